import pytest

from offbeat.net import RangeError, byte_range, is_this_machine


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


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (None, None),
        ("", None),
        ("bytes=-", None),
        ("lines=1-2", None),
        ("bytes=0-", (0, 10)),
        ("bytes=2-4", (2, 5)),
        ("bytes=2-99", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
    ],
)
def test_a_range_of_bytes_is_what_its_header_asks_for(header: str | None, part: tuple[int, int] | None):
    assert byte_range(header, 10) == part


@pytest.mark.parametrize(
    ("header", "status"),
    [("bytes=10-", 416), ("bytes=4-2", 416), (f"bytes=0-{'9' * 18}", None), (f"bytes=0-{'9' * 19}", 400)],
)
def test_a_range_that_cannot_be_sent_is_refused_by_its_status(header: str, status: int | None):
    if status is None:
        assert byte_range(header, 10) == (0, 10)
        return
    with pytest.raises(RangeError) as refused:
        byte_range(header, 10)
    assert refused.value.status == status
