"""What every test shares: two tiers, how long properties are tried, and a quick start for processes.

Tests marked `full` are left out of `make test` (`-m "not full"`), which also tries properties on fewer examples.
"""

import os
import signal

import pytest
import zygote
from hypothesis import settings

from offbeat.cli.main import spin_briefly

os.environ["OFFBEAT_TESTING"] = "1"  # allows the paced engine, also in processes that tests start
spin_briefly()  # as the command line does: tests run side by side
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or all that tests start would ignore Ctrl-C too
zygote.install()

FAST_TIER = "not full"
LONG_S = 5.0
"""A test of the fast tier that takes longer is named at the end of the run."""
SHARE = 0.3
"""Examples that the fast tier tries of those that a property asks for."""
MIN_EXAMPLES = 8
settings.register_profile("full", deadline=None)  # how long an example takes says nothing on shared cores
settings.register_profile("fast", settings.get_profile("full"), max_examples=30)
_long: dict[str, float] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: one of the few that `make test-engines SMOKE=1` runs with a real vLLM")
    settings.load_profile("fast" if config.option.markexpr == FAST_TIER else "full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("full"):  # scripts/full_tier.py reads it in the results
            item.user_properties.append(("full", item.nodeid.partition("::")[0]))
    if config.option.markexpr == FAST_TIER:
        owners = {owner for item in items for owner in (getattr(item, "obj", None), getattr(item, "cls", None))}
        for owner in owners:
            _try_fewer_examples(owner)


def _try_fewer_examples(owner: object) -> None:
    """Of a test function or a state machine that says itself how many it wants; all others follow the profile."""
    for name in ("_hypothesis_internal_use_settings", "settings"):
        asked = getattr(owner, name, None)
        if isinstance(asked, settings):
            fewer = min(asked.max_examples, max(MIN_EXAMPLES, int(asked.max_examples * SHARE)))
            setattr(owner, name, settings(asked, max_examples=fewer))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "full" not in report.keywords:
        _long[report.nodeid] = _long.get(report.nodeid, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = sorted(((took_s, name) for name, took_s in _long.items() if took_s > LONG_S), reverse=True)
    if found:
        terminalreporter.section(f"took more than {LONG_S:.0f} s without the marker full", sep="-")
        for took_s, name in found:
            terminalreporter.write_line(f"{took_s:6.1f} s  {name}")
