"""The page on training: its table is what its own rates add up to."""

import re

from doc_reader import ROOT

from benchmarks.common.shapes import SHAPES, Shape

PAGE = (ROOT / "docs" / "training.md").read_text()
CARDS_GB = (25.8, 51.5, 85.9, 150.8)  # 24, 48, 80 GiB, and what an H200 reports
USABLE, SPARE, HEAD_GB, LEAST, MOST = 0.94, 0.9, 1.5, 4096, 32


def fits(shape: Shape, card_gb: float) -> str:
    """The first way by which `shape` is trained with micro-batches of a useful size, in the order of the page."""
    layer = 14.4 * shape.hidden + 6 * shape.inner
    plain_gb, kept_gb = shape.num_layers * layer / 1e9, (shape.num_layers * 2 * shape.hidden + layer) / 1e9
    billions = shape.num_parameters / 1e9
    states_gb = {"all weights": 18 * billions, "moments on host": 10 * billions + 0.8, "LoRA": 2.1 * billions}
    for name, state_gb in states_gb.items():
        room_gb = SPARE * (USABLE * card_gb - state_gb - HEAD_GB)
        for way, per_token_gb in ((name, plain_gb), (f"{name}, checkpointed", kept_gb)):
            if room_gb / per_token_gb >= LEAST:
                return f"{way}, {min(int(room_gb / per_token_gb) // 1024, MOST)}k"
    return "-"


def test_the_table_is_what_the_rates_add_up_to():
    rows = re.findall(r"^\| ([\d.]+B) \| (.*) \|$", PAGE, re.MULTILINE)
    shown = {name.lower(): tuple(cells.split(" | ")) for name, cells in rows}
    assert shown == {name: tuple(fits(SHAPES[name], card) for card in CARDS_GB) for name in shown}
    assert len(shown) == 5


def test_the_rates_are_those_that_were_measured():
    def computed_gib(name: str, tokens: int, *, checkpointed: bool = False, state_bytes: int = 18) -> float:
        shape = SHAPES[name]
        layer = 14.4 * shape.hidden + 6 * shape.inner
        per_token = shape.num_layers * 2 * shape.hidden + layer if checkpointed else shape.num_layers * layer
        return (state_bytes * shape.num_parameters + 1.2e9 + tokens * per_token) / 2**30

    found = {gib: float(gib) for gib in re.findall(r"([\d.]+) GiB", PAGE)}
    measured = {
        "59.1": computed_gib("1.5b", 16384),
        "31.4": computed_gib("1.5b", 32768, checkpointed=True),
        "88.2": computed_gib("4b", 8192),
        "130.9": computed_gib("7.6b", 8192, checkpointed=True),
        "122.3": computed_gib("12b", 16384, checkpointed=True, state_bytes=10),
    }
    assert measured.keys() == found.keys()
    for text, gib in measured.items():
        assert abs(gib / found[text] - 1) < 0.03, (text, gib)
