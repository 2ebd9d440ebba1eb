"""The ledger: the durable record of groups, tasks, trajectories, rewards, batches and versions.

It is the only buffer and the only data cursor: a run that is killed at any moment goes on from here. Every method that
changes something is one transaction, which is on disk when the method returns; if it raises, nothing changed. Methods
are synchronous and meant for one thread at a time, which need not be the one that opened the ledger. What to admit,
hand out, take and drop is decided by `offbeat.control`; the ledger loads the candidates and stores the answer.

    ledger = Ledger(run / "ledger.sqlite", min_group=2, max_attempts=3)
    ledger.release()                                   # after a restart nobody holds a lease
    resumed = ledger.reconcile(step, version)          # of the checkpoint; (0, None) without one
    ledger.publish(Version(ledger.next_version_number(), resumed.step, resumed.parent, digest, path))
    ...
    count = admit(ledger.standing(), Pace(groups_per_step, num_steps))    # offbeat.control.admit
    ledger.admit([NewGroup(...), ...])
    tasks = ledger.lease("worker", capacity, have_version)
    ledger.submit([Submission(trajectory, "worker", task.fence), ...])
    ledger.score([Scored(u.task, rewards) for u in ledger.unscored(limit)])
    batch = ledger.claim(step, groups_per_step, bound)                    # None: not enough groups are ready
    ledger.commit(step, Version(ledger.next_version_number(), step + 1, ledger.latest_version().number, ...))
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from offbeat.control.admit import Standing
from offbeat.control.leases import Held
from offbeat.control.settle import Terms
from offbeat.control.trust import Compared
from offbeat.ledger import (
    backup,
    batches,
    counts,
    groups,
    look,
    prune,
    resume,
    scoring,
    story,
    submissions,
    tasks,
    trainers,
    verify,
    versions,
    workers,
)
from offbeat.ledger.bodies import Bodies
from offbeat.ledger.database import Database
from offbeat.ledger.errors import LedgerError, Unknown
from offbeat.ledger.records import (
    Batch,
    ComparedSegment,
    Counts,
    Cursor,
    EvalRound,
    NewGroup,
    Outcome,
    Reconciled,
    Scored,
    Scores,
    Submission,
    Surviving,
    TaskState,
    Unscored,
)
from offbeat.trajectory import Task, Trajectory
from offbeat.weights.version import Version

P = ParamSpec("P")
R = TypeVar("R")


class Ledger:
    """See the module."""

    def __init__(
        self,
        path: Path | str,
        *,
        min_group: int = 1,
        max_no_signal: float = 0,
        max_attempts: int = 3,
        max_staleness: int = 0,
        max_kv_lag: int = 0,
        groups_per_step: int | None = None,
        stops: bool = False,
        read_only: bool = False,
        must_exist: bool = False,
        wall_clock: Callable[[], float] = time.time,
    ):
        """`max_no_signal` is how many groups whose rewards are all equal may be dropped for a step. `max_kv_lag` is how
        many versions keys and values may be older than the weights that sampled with them. With `stops`, work comes in
        rounds: from the publication of a version until the batch of its step is claimed. With `must_exist` a missing
        or empty file is refused instead of becoming an empty ledger."""
        self.terms = Terms(min_group, max_no_signal)
        self.max_attempts, self.max_staleness, self.groups_per_step = max_attempts, max_staleness, groups_per_step
        self.max_kv_lag, self.stops = max_kv_lag, stops
        self._db = Database(Path(path), read_only=read_only, must_exist=must_exist, wall_clock=wall_clock)
        self._bodies = Bodies(self._db)

    def close(self) -> None:
        self._db.close()

    def check_pages(self, within_s: float) -> None:
        """Raises if pages of the file are damaged, as far as a look at it within this time can tell."""
        self._db.check_pages(within_s)

    def begin_with(self, rules: Mapping[str, Any]) -> None:
        """Records what is fixed for the life of the run; once, when the ledger is new."""
        with self._db.transaction():
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('rules', ?)", (json.dumps(rules),))

    def begun_with(self) -> dict[str, Any] | None:
        """What was recorded as fixed for the life of the run; None where the run never began."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'rules'").fetchone()
        return None if row is None else json.loads(row[0])

    def naming_damage(self) -> AbstractContextManager[None]:
        """Inside, a full disk or a damaged file is a `LedgerError` that names the ledger and says what to do."""
        return self._db.naming_damage()

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes calls in one transaction, which is on disk when this returns: each one's result, or its error, which
        has changed nothing. Raises what no call could do anything about, and then nothing was changed at all."""
        results: list[Any] = []
        with self._db.transaction():
            for call in calls:
                try:
                    with self.naming_damage():
                        results.append(call())
                except Exception as error:
                    if not self._db.connection.in_transaction:  # as when the disk is full
                        raise
                    results.append(error)
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Admission

    def cursor(self) -> Cursor:
        """How many training groups were drawn, in all and from each source."""
        return groups.cursor(self._db)

    def standing(self) -> Standing:
        """What `offbeat.control.admit.admit` needs to say how many groups to draw now."""
        return groups.standing(self._db)

    def admit(self, new: Sequence[NewGroup]) -> list[int]:
        """Creates groups with their tasks and moves the cursor past them; returns the groups' ids."""
        with self._db.transaction():
            return groups.admit(self._db, new)

    # Work

    def lease(
        self,
        worker: str,
        capacity: int,
        have_version: int | None,
        *,
        total_slots: int | None = None,
        only_eval: bool = False,
        skips_failed: bool = False,
    ) -> list[Task]:
        """Hands open tasks to a worker: those that require the version it has; or none, as far as pacing allows. Where
        work comes in rounds there is nothing but evaluation between them. With `skips_failed`, tasks that it failed
        itself are left to others."""
        with self._db.transaction():
            is_between = self.stops and batches.under_way(self._db)
            only_eval = only_eval or is_between
            asking = tasks.Asking(worker, capacity, have_version, total_slots, only_eval, skips_failed)
            return tasks.lease(self._db, asking, self.max_staleness, self.groups_per_step)

    def wanted_version(self) -> int | None:
        """The version that the first open task requires: what a worker that is given no task should load."""
        return tasks.wanted_version(self._db)

    def leased(self) -> list[Held]:
        """Every lease, those of before a restart too."""
        return tasks.leased(self._db)

    def suspects(self) -> list[int]:
        """Tasks under way that workers have vanished with."""
        return tasks.suspects(self._db)

    def still_held(self, worker: str, leases: Sequence[tuple[int, int]]) -> list[Held]:
        """Of the leases that a worker believes to hold, by task and fence, those that it does."""
        return tasks.still_held(self._db, worker, leases)

    def release(self, worker: str | None = None) -> int:
        """Opens the tasks of a worker that leaves, or where nobody can hold one, all; costs no attempt. Returns how
        many."""
        with self._db.transaction():
            return tasks.release(self._db, worker)

    def give_back(self, leases: Sequence[Held], *, untouched: bool = False) -> int:
        """Opens tasks that their workers do not know of any more, or have left `untouched`; costs no attempt. Returns
        how many were held."""
        with self._db.transaction():
            return tasks.give_back(self._db, leases, untouched=untouched)

    def lose(self, leases: Sequence[Held]) -> int:
        """Takes back the leases of workers that have vanished; what is to blame counts as a failed attempt."""
        with self._db.transaction():
            return tasks.lose(self._db, leases, self.terms, self.max_attempts)

    def fail(
        self, worker: str, task: int, fence: int, reason: str, detail: str | None = None, *, counts: bool = True
    ) -> TaskState:
        """An attempt failed. The task is opened again, or ends as failed after `max_attempts` that count."""
        with self._db.transaction():
            return tasks.fail(
                self._db, worker, task, fence, reason, detail, self.terms, self.max_attempts, counts=counts
            )

    def set_aside(self, worker: str, why: str, seconds: float) -> int:
        """Takes down that a worker is given nothing for a while, because it failed what it was given; its failures
        count no longer against tasks that have not ended. Returns how many they were."""
        with self._db.transaction():
            workers.set_aside(self._db, worker, why, seconds)
            return tasks.forgive(self._db, worker)

    def submit(self, submitted: Sequence[Submission]) -> list[Outcome | LedgerError]:
        """Stores trajectories and partials; those that may not be stored are answered with the error, and the others
        are stored all the same."""
        with self._db.transaction():
            return submissions.submit(self._db, self._bodies, submitted, self.max_staleness, self.max_kv_lag)

    # Rewards

    def unscored(self, limit: int, after: int = 0) -> list[Unscored]:
        """Trajectories that wait for their reward, in order of acceptance, past the `seq` given."""
        return scoring.unscored(self._db, self._bodies, limit, after)

    def score(self, results: Sequence[Scored]) -> Scores:
        """Stores rewards and failures, and ends groups whose last they were."""
        with self._db.transaction():
            return scoring.score(self._db, results, self.terms)

    def failure_share(self, window: int) -> float:
        """The share of failures among the latest `window` rewards."""
        return scoring.failure_share(self._db, window)

    # Batches and versions

    def claim(self, step: int, count: int, bound: int, *, in_order: bool = True) -> Batch | None:
        """The batch of a step: chosen once, the same ever after; None while too few groups are ready. The step may be
        that of the latest version or, once that one's batch is chosen, the next."""
        with self._db.transaction():
            return batches.claim(self._db, self._bodies, step, count, bound, in_order=in_order)

    def commit(
        self, step: int, version: Version, audited: Sequence[int] = (), compared: Sequence[ComparedSegment] = ()
    ) -> None:
        """The batch of `step` was trained, without the tasks that an audit left out, and gave `version`, of step + 1.
        `compared` is what the audit found of its segments. Repeating it changes nothing."""
        with self._db.transaction():
            batches.commit(self._db, step, version, audited, compared)

    def current_round(self) -> int | None:
        """The version whose round is under way; None before the first, and while a batch is claimed and not trained."""
        newest = self.latest_version()
        return None if newest is None or batches.under_way(self._db) else newest.number

    def survivors(self) -> list[Surviving]:
        """Training groups that were begun and are in no batch yet, whatever their members have so far."""
        return batches.survivors(self._db)

    def publish(self, version: Version) -> None:
        """Records a version without a batch: a run's first, or after a resume."""
        with self._db.transaction():
            versions.publish(self._db, version)

    def latest_version(self) -> Version | None:
        """The newest version that is not abandoned."""
        return versions.latest(self._db)

    def version(self, number: int) -> Version:
        """A published version, abandoned or not."""
        found = versions.find(self._db, number)
        if found is None:
            raise Unknown(f"version {number}: never published")
        return found[0]

    def versions_in_use(self) -> list[int]:
        """Versions whose weights somebody may still ask for."""
        return versions.in_use(self._db)

    def versions_needed(self, checkpoint_step: int) -> list[int]:
        """Versions whose pieces somebody may still ask for; see `offbeat.ledger.versions`."""
        return versions.needed(self._db, checkpoint_step)

    def next_version_number(self) -> int:
        return versions.next_number(self._db)

    # Trainers

    def reconcile(
        self, checkpoint_step: int, checkpoint_version: int | None, arrival: trainers.Arrival | None = None
    ) -> Reconciled:
        """Takes back what a checkpoint does not know, and makes the trainer that arrives with it the only one that may
        change the run; see `offbeat.ledger.resume`. Call it at every start of a trainer."""
        with self._db.transaction():
            return resume.reconcile(self._db, checkpoint_step, checkpoint_version, arrival or trainers.Arrival())

    def under(self, generation: int, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Makes a trainer's call, unless another trainer has taken over since: then it changes nothing."""
        with self._db.transaction():
            trainers.check(self._db, generation)
            return call(*args, **kwargs)

    def check_generation(self, generation: int) -> None:
        """Raises unless this is the generation of the latest trainer, which is 0 before the first."""
        trainers.check(self._db, generation)

    def checkpointed(self, step: int) -> None:
        """The latest trainer has a durable checkpoint of this step."""
        with self._db.transaction():
            trainers.checkpointed(self._db, step)

    # Room

    def prune(self, step: int, keep: int = 0) -> prune.Pruned:
        """Forgets the bytes of trajectories that a resume from a durable checkpoint of `step`, or a newer one, cannot
        need; those of the last `keep` steps before it are spared. See `offbeat.ledger.prune`."""
        pruned = prune.Pruned(0, 0)
        while True:
            with self._db.transaction():
                slice_ = prune.prune_slice(self._db, step - keep)
            pruned += slice_
            if slice_.num_bodies < prune.SLICE:
                return pruned + prune.Pruned(0, self.sweep())

    def sweep(self) -> int:
        """Removes files of bodies that nothing names any more; returns how many bytes that freed."""
        return prune.sweep(self._db)

    def backup(self, target: str | Path) -> backup.Backup:
        """Copies the ledger as it is now into a folder or behind a URL, whoever writes meanwhile; any thread may call
        it. See `offbeat.ledger.backup`."""
        return backup.backup(self._db.path, target)

    # Workers

    def issue_token(self, role: workers.Role, minutes: float) -> str:
        """A token that one worker may join with, once, within the time; it is seen here and never again."""
        with self._db.transaction():
            return workers.issue_token(self._db, role, minutes)

    def is_token(self, token: str) -> bool:
        """Whether a join token was ever issued; it may be used up or too old."""
        return workers.is_token(self._db, token)

    def redeem(self, token: str, name: str, capabilities: Mapping[str, Any], secret_hash: bytes) -> workers.Joined:
        """Exchanges a join token for a worker of that name, or of the next free one like it, whose secret has this
        hash; told the same again, it returns the same worker."""
        with self._db.transaction():
            return workers.redeem(self._db, token, name, capabilities, secret_hash)

    def worker_of(self, secret: str) -> workers.Worker | None:
        """Who a secret belongs to; what another process revoked a moment ago is seen as revoked."""
        return workers.find(self._db, secret)

    def num_worker_moves(self) -> int:
        """Grows whenever a worker's state changes, whichever process changed it."""
        return workers.num_moves(self._db)

    def move_worker(self, name: str, state: workers.WorkerState, reason: str | None = None) -> workers.WorkerState:
        """Revokes, quarantines, sends away or brings back a worker; returns its state then."""
        with self._db.transaction():
            return workers.move(self._db, name, state, reason)

    def add_signer(self, key: str, worker: str) -> None:
        """A trainer names the public key with which it signs manifests."""
        with self._db.transaction():
            workers.add_signer(self._db, key, worker)

    def signers(self) -> list[str]:
        """Keys whose manifests are to be believed."""
        return workers.signers(self._db)

    def active_workers(self) -> set[str]:
        """The names of those who take part now."""
        return workers.active(self._db)

    def list_workers(self) -> list[workers.Worker]:
        """Everyone who ever joined, with how many tasks they hold."""
        return workers.listed(self._db)

    def audited(self, tasks: Sequence[int]) -> dict[str, list[Compared]]:
        """What audits found lately of workers that handed in a part of these tasks, and are not shut out."""
        return workers.audited(self._db, tasks)

    def num_leased(self) -> dict[str, int]:
        """How many tasks each worker holds, whether it joined or runs beside us."""
        return workers.num_leased(self._db)

    # Looking

    def eval_results(self, step: int | None = None) -> list[EvalRound]:
        """Evaluation rounds of a step, or all of them; those left behind by a resume are marked."""
        return counts.eval_results(self._db, step)

    def eval_round(self, step: int) -> EvalRound | None:
        """The evaluation of a step in the surviving history."""
        rounds = [found for found in self.eval_results(step) if not found.is_abandoned]
        return rounds[0] if rounds else None

    def waiting_for(self) -> str:
        """What keeps the next batch from being complete, for the one who waits for it in vain."""
        return counts.waiting_for(self._db)

    def counts(self) -> Counts:
        return counts.counts(self._db)

    def story(self) -> story.Story:
        """Everything that a person may want to know; see `offbeat.ledger.story`."""
        return story.story(self._db)

    def rows(self, limit: int, order: str = "latest", step: int | None = None) -> list[look.Row]:
        """Trajectories as a list for people: the latest, the best or the worst, of a step or of all."""
        return look.rows(self._db, limit, order, step)

    def trajectories_of(self, rows: list[look.Row]) -> list[Trajectory | None]:
        """What the rows stand for; None where it was pruned."""
        return look.load(self._db, self._bodies, rows)

    def walk(self, step: int | None = None) -> Iterator[tuple[look.Row, Trajectory | None]]:
        """Every trajectory, in order of acceptance; of a step or of all."""
        return look.walk(self._db, self._bodies, step)

    def look(self, task: int) -> look.Look:
        """One task with its trajectory and its history."""
        return look.look(self._db, self._bodies, task)

    def verify(self, *, with_bodies: bool = True) -> verify.Report:
        """Checks everything that must always hold; see `offbeat.ledger.verify`."""
        return verify.verify(self._db, with_bodies=with_bodies)
