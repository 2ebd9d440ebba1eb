import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.net import RangeError, byte_range, is_this_machine

PLACES = st.integers(0, 40)


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


@given(PLACES, PLACES, st.integers(0, 30))
def test_a_range_names_the_bytes_that_the_standard_says(first, last, num_bytes):
    data = bytes(range(num_bytes))
    for header, wanted in (
        (f"bytes={first}-{last}", data[first : last + 1]),
        (f"bytes={first}-", data[first:]),
        (f"bytes=-{last}", data[-last:] if last else b""),
    ):
        if wanted:
            start, stop = byte_range(header, num_bytes)
            assert data[start:stop] == wanted
        else:
            with pytest.raises(RangeError, match=f"the file has {num_bytes} bytes") as caught:
                byte_range(header, num_bytes)
            assert caught.value.status == 416


@pytest.mark.parametrize("header", [None, "", "bytes=-", "lines=1-2", "bytes=1-2,4-5", "bytes=a-b", "bytes= 1-2"])
def test_a_range_in_another_form_asks_for_everything(header):
    assert byte_range(header, 10) is None


@pytest.mark.parametrize("header", ["bytes={}-", "bytes=1-{}", "bytes=-{}"])
def test_a_number_of_thousands_of_digits_is_refused(header):
    with pytest.raises(RangeError, match="more than 18 digits") as caught:
        byte_range(header.format("9" * 5000), 10)
    assert caught.value.status == 400
    assert byte_range("bytes=0-" + "9" * 18, 10) == (0, 10)
