from __future__ import annotations

from ledger_run import answer, handed, new_groups

from offbeat.ledger.bodies import OVERHEAD_BYTES, Bodies
from offbeat.ledger.ledger import Ledger


def test_what_is_kept_stays_within_its_room_and_the_rest_comes_from_the_file(ledger: Ledger):
    ledger.admit(new_groups(ledger, 4, size=2))
    answers = [answer(task, [0]) for task in reversed(ledger.lease("w", 8, 0))]
    ledger.submit([handed(trajectory) for trajectory in answers])
    sent = dict(enumerate(answers, start=1))  # by their order of acceptance
    digests = ledger.execute("SELECT seq, digest FROM trajectories").fetchall()
    bodies = Bodies(ledger.execute, ledger.blobs, max_kept_bytes=3 * OVERHEAD_BYTES)
    for seq, digest in digests:
        bodies.keep(digest, sent[seq].encode())
        bodies.keep(digest, sent[seq].encode())
    assert 0 < len(bodies._kept) < 3
    assert bodies.load(digests) == sent
    assert bodies.load(digests) == sent, "also once they are objects"
    assert Bodies(ledger.execute, ledger.blobs).load(digests) == sent
