"""What a run's roles are built from, by its configuration."""

import pytest

from offbeat.config import load
from offbeat.launch.wiring import publishes_pieces


@pytest.mark.parametrize(
    ("overrides", "is_away", "in_pieces"),
    [
        ([], False, False),
        ([], True, True),
        (["--weights.deltas=always"], False, True),
        (["--weights.deltas=never"], False, False),
        (["--weights.deltas=never"], True, True),
        (["--weights.store=/mnt/store"], False, True),
        (["--serve.behind-proxy"], False, True),
        (["--serve.host=0.0.0.0"], False, True),
    ],
)
def test_versions_are_published_in_pieces_where_somebody_else_may_fetch_them(overrides, is_away, in_pieces):
    assert publishes_pieces(load(None, overrides), is_away=is_away) is in_pieces
