"""Reads a `Workload` from a TOML file; each error message is one line.

[model] is a known name, the path of a config.json (relative to the file), or numbers. Lengths are constant, uniform,
log-normal, a histogram, or taken from a finished run. The caller passes the `RunReader` that reads a run.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from offbeat.config.explain import ValueOrigin, show
from offbeat.config.load import load_as
from offbeat.config.schema import Section
from offbeat.errors import UserError
from offbeat.planner.inputs import model_shapes, workload
from offbeat.planner.inputs.workload import KvPolicy, LengthStatistics, ModelShape, RewardMachines, Workload

RunReader = Callable[[str, Literal["prompt", "answer"]], Sequence[int]]
"""Returns the lengths of prompts or answers in a run, given the run's folder."""
FORMS: dict[str, tuple[str, ...]] = {
    "constant": ("tokens",),
    "log-normal": ("median", "sigma", "longest"),
    "uniform": ("shortest", "longest"),
    "histogram": ("edges", "counts"),
    "run": ("run",),
}
"""Allowed forms of a length table, each with its keys."""
NUMBERS = ("num_layers", "hidden", "num_heads", "num_kv_heads", "ffn", "vocab")
"""Required keys of a model described by numbers."""
EXPERTS = ("num_experts", "experts_per_token", "num_shared_experts", "dense_layers", "dense_ffn")
MORE_NUMBERS = ("head_dim", "is_tied", *EXPERTS)
Count = Field(None, ge=1)


class ModelTable(Section):
    name: str | None = None
    config: str | None = None
    num_layers: int | None = Count
    hidden: int | None = Count
    num_heads: int | None = Count
    num_kv_heads: int | None = Count
    head_dim: int | None = Count
    ffn: int | None = Count
    vocab: int | None = Count
    is_tied: bool | None = None
    num_experts: int | None = Count
    experts_per_token: int | None = Count
    num_shared_experts: int | None = Field(None, ge=0)
    dense_layers: int | None = Field(None, ge=0)
    dense_ffn: int | None = Count
    bytes_per_weight: int = Field(2, ge=1, le=4)
    bytes_per_kv: int = Field(2, ge=1, le=4)


class BatchTable(Section):
    groups_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)


class LengthsTable(Section):
    tokens: float | None = Field(None, gt=0)
    median: float | None = Field(None, gt=0)
    sigma: float | None = Field(None, ge=0)
    shortest: float | None = Field(None, ge=0)
    longest: float | None = Field(None, gt=0)
    edges: list[float] | None = None
    counts: list[float] | None = None
    run: str | None = None
    quantile: float = Field(workload.QUANTILE, gt=0, lt=1)


class AlgorithmTable(Section):
    reference: bool = False
    critic: bool = False
    updates_per_step: int = Field(1, ge=1)
    recompute_logprobs: bool = True
    lora_rank: int = Field(0, ge=0)


class RulesTable(Section):
    max_staleness: int = Field(4, ge=0)
    colocate: bool | None = None
    kv: Literal["refill", "stale", "finish"] = "refill"
    waste: float = Field(0.0, ge=0, lt=1)
    headroom: float = Field(0.1, ge=0, le=1)
    delta_density: float = Field(1.0, gt=0, le=1)


class RewardTable(Section):
    seconds: float = Field(gt=0)
    slots: int = Field(ge=1)
    price: float = Field(0.0, ge=0)


class WorkloadFile(Section):
    model: ModelTable
    batch: BatchTable
    prompt: LengthsTable
    answer: LengthsTable
    algorithm: AlgorithmTable = AlgorithmTable()
    rules: RulesTable = RulesTable()
    reward: RewardTable | None = None


EXAMPLE = (
    'model.name = "Qwen2.5-7B", batch = {groups_per_step = 32, group_size = 16}, prompt.tokens = 500 and '
    "answer.tokens = 2000"
)


def _refusal(data: Mapping[str, Any]) -> str:
    """Returns why a file with the content `data` cannot describe a workload; "" if it can."""
    if "classes" in data and "model" not in data:
        return "describes a cluster; give the workload's file second, as in offbeat plan CLUSTER.toml WORKLOAD.toml"
    return "" if data else f"is empty; describe the workload, for example {EXAMPLE}"


def load_workload(path: pathlib.Path | str, read_run: RunReader | None = None) -> Workload:
    """Reads a workload file. If the file names a run, `read_run` reads the lengths in that run (None: a file that names
    a run is refused)."""
    file, origin = load_as(path, WorkloadFile, _refusal)
    algorithm, rules, reward = file.algorithm, file.rules, file.reward
    if rules.colocate and rules.max_staleness:
        where, remedy = origin.before(("rules", "colocate")), "set rules.max_staleness = 0, or leave colocate out"
        raise UserError(f"{where}rules.colocate = true: works only if generation waits for training; {remedy}")
    tables = {"prompt": file.prompt, "answer": file.answer}
    runs = {name: table.run for name, table in tables.items() if table.run is not None}
    return Workload(
        model=_model(file.model, origin),
        groups_per_step=file.batch.groups_per_step,
        group_size=file.batch.group_size,
        prompt=_lengths("prompt", file.prompt, origin, read_run),
        answer=_lengths("answer", file.answer, origin, read_run),
        bound=rules.max_staleness,
        colocates=rules.colocate is not False,
        updates_per_step=algorithm.updates_per_step,
        has_reference=algorithm.reference,
        has_critic=algorithm.critic,
        recomputes_logprobs=algorithm.recompute_logprobs,
        lora_rank=algorithm.lora_rank,
        kv=KvPolicy(rules.kv),
        waste_share=rules.waste,
        headroom=rules.headroom,
        delta_density=rules.delta_density,
        reward=RewardMachines(reward.seconds, reward.slots, reward.price) if reward else None,
        assumptions=tuple(f"{name}: lengths of the run {run}" for name, run in runs.items()),
    )


def _model(table: ModelTable, origin: ValueOrigin) -> ModelShape:
    numbers = {key: value for key in (*NUMBERS, *MORE_NUMBERS) if (value := getattr(table, key)) is not None}
    where = f"{origin.before(('model',))}[model]"
    if table.config is not None and numbers:
        raise UserError(f"{where}: config and {next(iter(numbers))} are both given; keep either config or the numbers")
    if table.config is not None:
        shape = model_shapes.read_config(pathlib.Path(origin.file or "").parent / table.config)
        shape = dataclasses.replace(shape, name=table.name or shape.name)
    elif numbers:
        shape = _from_numbers(table.name or "model", numbers, where)
    elif table.name is not None:
        try:
            shape = model_shapes.known_model(table.name)
        except UserError as error:
            raise UserError(f"{origin.before(('model', 'name'))}model.name = {error}") from None
    else:
        raise UserError(f"{where}: give name, config, or {', '.join(NUMBERS)}")
    return dataclasses.replace(shape, bytes_per_weight=table.bytes_per_weight, bytes_per_kv=table.bytes_per_kv)


def _from_numbers(name: str, numbers: dict[str, int], where: str) -> ModelShape:
    missing = [key for key in NUMBERS if key not in numbers]
    if "num_experts" in numbers and "experts_per_token" not in numbers:
        missing.append("experts_per_token")
    if numbers.get("dense_layers") and "dense_ffn" not in numbers:
        missing.append("dense_ffn")
    if missing:
        raise UserError(f"{where}: missing {', '.join(missing)}; give each a value")
    if "head_dim" not in numbers and numbers["hidden"] % numbers["num_heads"]:
        why = f"num_heads = {numbers['num_heads']} does not divide hidden = {numbers['hidden']}"
        raise UserError(f"{where}: head_dim is missing, and {why}; give head_dim")
    if numbers["num_heads"] % numbers["num_kv_heads"]:
        why = f"num_kv_heads = {numbers['num_kv_heads']} does not divide num_heads = {numbers['num_heads']}"
        raise UserError(f"{where}: {why}; correct one of them")
    head_dim = numbers["hidden"] // numbers["num_heads"]
    return ModelShape(name=name, **{"head_dim": head_dim, **numbers})  # type: ignore[arg-type]


def _lengths(
    name: Literal["prompt", "answer"], table: LengthsTable, origin: ValueOrigin, read_run: RunReader | None
) -> LengthStatistics:
    where = f"{origin.before((name,))}[{name}]"
    given = {key for key in LengthsTable.model_fields if key != "quantile" and getattr(table, key) is not None}
    form = next((form for form, keys in FORMS.items() if given == set(keys)), None)
    if form is None and given != {"run", "longest"}:
        ways = ", or ".join(" + ".join(keys) for keys in FORMS.values())
        raise UserError(f"{where}: has {' + '.join(sorted(given)) or 'nothing'}; give {ways}")
    try:
        return _by_form(name, table, read_run)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _by_form(name: Literal["prompt", "answer"], table: LengthsTable, read_run: RunReader | None) -> LengthStatistics:
    """Length statistics of a table in one form: constant, log-normal, uniform, histogram or lengths of a run."""
    if table.tokens is not None:
        return workload.constant(table.tokens)
    if table.edges is not None and table.counts is not None:
        return workload.histogram(table.edges, table.counts, table.quantile)
    if table.run is not None:
        if read_run is None:
            raise UserError(f"run = {show(table.run)}: runs cannot be read here; give tokens, or edges and counts")
        cap = {} if table.longest is None else {"cap": table.longest}
        return workload.from_samples(read_run(table.run, name), table.quantile, **cap)
    assert table.longest is not None
    if table.median is not None and table.sigma is not None:
        return workload.log_normal(table.median, table.sigma, table.longest, table.quantile)
    return workload.uniform(table.shortest or 0.0, table.longest, table.quantile)
