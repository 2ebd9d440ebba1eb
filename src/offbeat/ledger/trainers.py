"""Trainers, of which one at a time may change a run: the one that came last.

Every trainer that begins takes a generation, one more than the one before it, and names it with each of its calls. A
call under an older generation is refused within its own transaction, so that of two trainers one trains and the other
hears why. A trainer that brings no checkpoint to a run that is past step 0 would undo all of it; it is let in where
nothing else can be done, or where it was told to begin from scratch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from offbeat.errors import RunStopped
from offbeat.ledger.database import Database


@dataclass(frozen=True)
class Arrival:
    """A trainer that begins, as it introduces itself."""

    name: str = "trainer"
    host: str = ""
    """The machine it runs on, for people."""
    home: str = ""
    """Identity of the folder that its checkpoints are in; a restart of the same trainer has the same."""
    from_scratch: bool = False
    """Whether it may undo all of a run that it has no checkpoint of."""


@dataclass(frozen=True)
class Trainer:
    """One that began, and what is known of its checkpoints."""

    generation: int
    name: str
    host: str
    home: str
    began_at: float
    checkpoint_step: int | None
    """Of its latest durable checkpoint; None: it has told of none."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.began_at))
        return f"{self.name}{f' on {self.host}' if self.host else ''}, since {since}"


def latest(db: Database) -> Trainer | None:
    """The trainer that may change the run; None before the first."""
    query = "SELECT generation, name, host, home, began_at, checkpoint_step FROM trainers ORDER BY generation DESC"
    row = db.execute(f"{query} LIMIT 1").fetchone()
    return None if row is None else Trainer(*row)


def check(db: Database, generation: int) -> None:
    """Raises unless this is the generation of the latest trainer, which is 0 before the first."""
    newest = latest(db)
    known = 0 if newest is None else newest.generation
    if generation < known:
        raise RunStopped(
            f"another trainer has taken over: {newest} (generation {known}, this one has {generation}); end one of "
            "the two"
        )
    if generation > known:
        raise RunStopped(
            f"{db.path}: has no trainer of generation {generation}, only up to {known}, so it is not the ledger that "
            "this trainer began with; start the trainer again"
        )


def why_not_from_scratch(before: Trainer | None, arrival: Arrival, step: int) -> str | None:
    """Why a trainer without a checkpoint may not undo a run that has come to `step`; None where it may.

    A trainer that was killed before its first checkpoint has no other way to go on: it is known by its folder.
    """
    if before is None or arrival.from_scratch or step == 0:
        return None
    if before.checkpoint_step is None and before.home == arrival.home:
        return None
    last = "" if before.checkpoint_step is None else f", which has a checkpoint of step {before.checkpoint_step}"
    return (
        f"the run is at step {step}, and this trainer has no checkpoint; start it with the folder of the one before "
        f"({before}){last}, or with --from-scratch to undo all steps"
    )


def take_over(db: Database, arrival: Arrival, checkpoint_step: int | None) -> int:
    """Makes a trainer the one that may change the run; returns its generation."""
    before = latest(db)
    generation = 1 if before is None else before.generation + 1
    db.execute(
        "INSERT INTO trainers (generation, name, host, home, began_at, checkpoint_step) VALUES (?, ?, ?, ?, ?, ?)",
        (generation, arrival.name, arrival.host, arrival.home, db.wall_clock(), checkpoint_step),
    )
    return generation


def checkpointed(db: Database, step: int) -> None:
    """The latest trainer has a durable checkpoint of this step."""
    db.execute(
        "UPDATE trainers SET checkpoint_step = ? WHERE generation = (SELECT MAX(generation) FROM trainers)", (step,)
    )
