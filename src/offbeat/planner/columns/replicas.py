"""Shapes of rollout replicas on each class of nodes. A shape is a degree of tensor parallelism and a number of answers
in flight.

Every shape fits the memory of its cards, and its tensor parallelism divides both the attention heads and the cards of a
node. A shape is dropped if another one on the same cards beats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offbeat.errors import UserError
from offbeat.planner.cost.constants import Constants, Efficiencies
from offbeat.planner.cost.memory import max_rows, rollout_bytes, spare_bytes
from offbeat.planner.cost.rollout_time import decode_step_s, prompt_s, tail_s, update_s
from offbeat.planner.cost.sizes import mean_context_tokens
from offbeat.planner.cost.sync_time import swap_s, wake_s
from offbeat.planner.inputs.hardware import Inventory, MachineClass
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.problem import Gang, RolloutColumn

TENSOR_PARALLEL = (1, 2, 4, 8)
ROWS_GROWTH = 2**0.5
"""Ratio between neighbouring numbers of answers in flight that are tried. The token rates of two neighbours differ by
at most this factor."""
EVERY_ROW = 64
FINE_GROWTH = 1.02
"""For few machines (`gangs.is_complete`), every number of answers in flight up to `EVERY_ROW` is tried, and larger ones
in steps by this factor."""


def rollout_columns(
    inventory: Inventory,
    workload: Workload,
    constants: Constants,
    roots: Sequence[str],
    growth: float = ROWS_GROWTH,
) -> tuple[RolloutColumn, ...]:
    """Returns replica shapes (columns) on nodes rented for rollout. `roots` are the classes that may publish versions,
    `growth` is that of `row_grid`."""
    columns = []
    for machines in inventory.classes.values():
        if machines.num_nodes > 0:
            figures = constants.of(machines.accelerator.name)
            columns += undominated(class_columns(machines, workload, figures, roots, growth))
    if not columns:
        raise UserError(_too_large(inventory, workload, constants))
    return tuple(columns)


def home_columns(
    inventory: Inventory,
    workload: Workload,
    constants: Constants,
    training: Sequence[Gang],
    growth: float = ROWS_GROWTH,
) -> tuple[RolloutColumn, ...]:
    """Returns the replica shapes (columns) on nodes of a training gang. With a staleness bound above 0, they run on
    cards that do not train. With bound 0, training and generation take turns. Only shapes that fit on the cards beside
    the training state of at least one gang are returned. The training state stays on a card while the card generates.
    The engine's weights leave the card while it trains and are loaded again afterwards."""
    roots = sorted({gang.root for gang in training})
    found = []
    for name, machines in inventory.classes.items():
        hosts = [gang for gang in training if name in gang.nodes and (workload.may_share or gang.home_cards)]
        figures = constants.of(machines.accelerator.name)
        shapes = class_columns(machines, workload, figures, roots, growth) if hosts else []
        columns = [_at_home(column, machines, workload, figures) for column in shapes]
        found += undominated([column for column in columns if any(column.fits_beside(gang) for gang in hosts)])
    return tuple(found)


def _at_home(column: RolloutColumn, machines: MachineClass, workload: Workload, figures: Efficiencies) -> RolloutColumn:
    """Returns the column for nodes that train too: in turn on the same cards, or on cards that do not train."""
    if not workload.may_share:
        return replace(column, name=f"{column.name} beside", room_bytes=0.0)
    card = machines.accelerator
    return replace(
        column,
        name=f"{column.name} shared",
        blocking_s=dict.fromkeys(
            column.blocking_s,
            wake_s(workload, card, figures, column.tp) + tail_s(workload, card, figures, column.tp, column.token_s),
        ),
        room_bytes=spare_bytes(workload, card, figures, column.tp, column.concurrency),
    )


def class_columns(
    machines: MachineClass,
    workload: Workload,
    figures: Efficiencies,
    roots: Sequence[str],
    growth: float = ROWS_GROWTH,
) -> list[RolloutColumn]:
    """Returns all replica shapes (columns) on one class of nodes, even shapes that another shape beats."""
    found = []
    for tp in tensor_parallels(workload, machines):
        largest = min(max_rows(workload, machines.accelerator, figures, tp), in_flight_cap(workload))
        rows = row_grid(largest, growth)
        found += [rollout_column(machines, workload, figures, tp, num_rows, roots) for num_rows in rows]
    return found


def tensor_parallels(workload: Workload, machines: MachineClass) -> list[int]:
    """Degrees of tensor parallelism that divide the attention heads and the cards of a node."""
    return [tp for tp in TENSOR_PARALLEL if workload.model.num_heads % tp == 0 and machines.per_node % tp == 0]


def in_flight_cap(workload: Workload) -> int:
    """Largest number of trajectories in flight, over all replicas together, that the staleness bound allows."""
    return max(1, workload.bound) * workload.trajectories_per_step


def row_grid(largest: int, growth: float = ROWS_GROWTH) -> list[int]:
    """Numbers from 1 to `largest` in steps by the factor `growth`; empty if `largest` is 0. Steps by `FINE_GROWTH` or
    less begin at `EVERY_ROW`; below it, every number is returned."""
    grid, rows = [], 1.0
    if growth <= FINE_GROWTH:
        grid, rows = list(range(1, min(EVERY_ROW, largest))), float(EVERY_ROW)
    while rows < largest:
        grid.append(round(rows))
        rows *= growth
    return sorted({*grid, largest}) if largest > 0 else []


def rollout_column(
    machines: MachineClass, workload: Workload, figures: Efficiencies, tp: int, rows: int, roots: Sequence[str]
) -> RolloutColumn:
    """Builds one replica shape (column) with `rows` answers in flight and its predicted speed. Assumes that every
    answer has the mean length, and that the prefill of a prompt stops all running answers."""
    card = machines.accelerator
    busy_rows = max(1.0, rows * figures.busy_share)
    step_s = decode_step_s(workload.model, card, figures, tp, busy_rows, mean_context_tokens(workload))
    new_prompt_s = prompt_s(workload, card, figures, tp)
    tokens_per_s = workload.answer.mean / (workload.answer.mean * step_s / busy_rows + new_prompt_s)
    token_s = busy_rows / tokens_per_s
    # A node that is taken back generates nothing until it is replaced, and its answers, half done on average, begin
    # anew.
    tokens_per_s *= up_share(machines, 1, token_s * workload.answer.mean / 2)
    spare = spare_bytes(workload, card, figures, tp, rows)
    blocking_s = swap_s(workload, card, figures, tp, spare)
    if workload.bound:
        blocking_s += update_s(workload, card, figures, tp, busy_rows, token_s)
    else:  # no answer is in flight when a version comes: slots idle while the last answers of the step end
        blocking_s += tail_s(workload, card, figures, tp, token_s)
    return RolloutColumn(
        name=f"{machines.name} tp{tp} x{rows}",
        offer=machines.name,
        num_accelerators=tp,
        tp=tp,
        concurrency=rows,
        tokens_per_s=tokens_per_s,
        token_s=token_s,
        blocking_s=dict.fromkeys(roots, blocking_s),
        kv=str(workload.kv),
    )


def up_share(machines: MachineClass, num_nodes: int, lost_s: float) -> float:
    """Share of the time that work on `num_nodes` nodes goes on although the provider takes nodes back (spot machines).
    `lost_s` is the work in seconds that is lost with a node."""
    return 1 / (1 + num_nodes * machines.reclaims_per_h * (machines.restart_s + lost_s) / 3600)


def undominated(columns: Sequence[RolloutColumn]) -> list[RolloutColumn]:
    """Returns the columns (replica shapes) of one class that no other column beats; of equal columns, the first."""
    return [
        column
        for position, column in enumerate(columns)
        if not any(
            _beats(other, column) and not (_beats(column, other) and position < rank)
            for rank, other in enumerate(columns)
            if rank != position
        )
    ]


def _beats(one: RolloutColumn, other: RolloutColumn) -> bool:
    """Whether column `one` is at least as good as column `other` in every respect. On the cards of one replica of
    `other`, replicas of `one` must generate as many tokens per second with no more answers in flight. Their delays must
    not be longer, and they must leave as much memory for training."""
    if other.num_accelerators % one.num_accelerators:
        return False
    copies = other.num_accelerators // one.num_accelerators
    return (
        copies * one.concurrency <= other.concurrency
        and copies * one.tokens_per_s >= other.tokens_per_s
        and one.token_s <= other.token_s
        and all(one.blocking_s[root] <= other.blocking_s[root] for root in other.blocking_s)
        and (one.room_bytes or 0.0) >= (other.room_bytes or 0.0)
    )


def _too_large(inventory: Inventory, workload: Workload, constants: Constants) -> str:
    needs = {}
    for name, machines in inventory.classes.items():
        figures, degrees = constants.of(machines.accelerator.name), tensor_parallels(workload, machines)
        needs[name] = min(rollout_bytes(workload, figures, tp) for tp in degrees)
    least = min(needs, key=lambda name: needs[name])
    return (
        f"model {workload.model.name}: no class of machines has enough memory to generate with it; class {least} has "
        f"{inventory.classes[least].accelerator.memory_bytes / 1e9:.1f} GB per accelerator and would need "
        f"{needs[least] / 1e9:.1f} GB; add a class with more memory"
    )
