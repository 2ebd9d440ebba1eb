import pytest

from offbeat.net import is_this_machine


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("", False),
        ("192.0.2.1", False),
        ("no-such-host.invalid", False),
    ],
)
def test_only_loopback_is_this_machine_and_a_name_without_an_address_is_not(host: str, is_ours: bool):
    assert is_this_machine(host) == is_ours
