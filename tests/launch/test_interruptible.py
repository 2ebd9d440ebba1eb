import contextlib
import signal

import pytest

from offbeat.launch.stopping import interruptible


def interrupted(swallowed: bool) -> list[str]:
    """How far something gets that never awaits and is interrupted, perhaps within an import that catches everything."""
    reached = []
    with pytest.raises(KeyboardInterrupt):
        import_something(reached, swallowed)
    return reached


def import_something(reached: list[str], swallowed: bool) -> None:
    with interruptible():
        with contextlib.suppress(BaseException) if swallowed else contextlib.nullcontext():
            signal.raise_signal(signal.SIGINT)
        reached.append("its end")


def test_ctrl_c_ends_at_once_what_never_awaits():
    before = signal.getsignal(signal.SIGINT)
    assert interrupted(swallowed=False) == []
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_that_an_import_has_swallowed_ends_it_all_the_same():
    assert interrupted(swallowed=True) == ["its end"]
