"""Range headers: what they ask for, and what nobody can send."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.net import RangeError, byte_range

PLACES = st.integers(0, 40)


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
            with pytest.raises(RangeError, match=f"there are {num_bytes} bytes"):
                byte_range(header, num_bytes)


@pytest.mark.parametrize("header", [None, "", "bytes=-", "lines=1-2", "bytes=1-2,4-5", "bytes=a-b", "bytes= 1-2"])
def test_a_range_in_another_form_asks_for_everything(header):
    assert byte_range(header, 10) is None


@pytest.mark.parametrize("header", ["bytes={}-", "bytes=1-{}", "bytes=-{}"])
def test_a_number_of_thousands_of_digits_is_refused(header):
    with pytest.raises(RangeError, match="more than 18 digits") as caught:
        byte_range(header.format("9" * 5000), 10)
    assert caught.value.status == 400
    assert byte_range("bytes=0-" + "9" * 18, 10) == (0, 10)
