"""Checks a run before anything heavy is loaded: the same for `offbeat train`, `offbeat serve` and `--dry-run`.

`checking` builds and tries the parts that a coordinator needs: sources with all their rows, reward processes,
tokenizer, template and prompt lengths. `check_roles` checks what trainer and workers need on this machine: device and
engine. Weights are neither downloaded nor loaded.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.config.explain import show
from offbeat.config.schema import SERVED, Config
from offbeat.data.files import FileSource
from offbeat.data.mixture import Mixture
from offbeat.environments.wire import PartInfo
from offbeat.errors import UserError
from offbeat.extras import collecting_later
from offbeat.launch import engine_choice, episode_parts, wiring
from offbeat.launch.coordinator_runtime import Prepared, prepare
from offbeat.launch.given import Given
from offbeat.launch.model_size import num_parameters
from offbeat.launch.run_folder import RunFolder
from offbeat.launch.stopping import interruptible
from offbeat.model.loading import is_hub_name
from offbeat.observability.advice import Advice, few_held_out, few_rows, right_answer_earns, wrong_answer_fails
from offbeat.observability.loading import loading
from offbeat.observability.metric_files import read_events
from offbeat.rewards.pool import RewardPool

PICK_DEVICE = """
import sys
from offbeat.environments.wire import PartInfo
from offbeat.errors import UserError
from offbeat.model.devices import pick_device
try:
    pick_device(sys.argv[1])
except UserError as error:
    print(error)
"""


@dataclass(frozen=True)
class Checked:
    """The parts of a coordinator that have passed the checks, with what the checks found."""

    config: Config
    mixture: Mixture
    pool: RewardPool
    prepared: Prepared
    trials: list[wiring.Trial]
    num_parameters: int | None
    parts: Mapping[str, PartInfo]
    """Tools and environments by source."""

    @property
    def num_held_out(self) -> int:
        """Number of held-out prompts of an evaluation."""
        return len(self.mixture.held_out(self.config.eval.prompts))

    def lines(self) -> list[str]:
        """Returns lines that describe the checked model, prompts and rewards."""
        model, tokens, policy = self.config.model.path, self.prepared.tokens, self.config.rollout.long_prompts
        template = "a" if self.prepared.issuer.renderer.template else "no"
        count = "" if self.num_parameters is None else f"{self.num_parameters:,} parameters, "
        sizes = f"{count}window {tokens.window_tokens:,} tokens, vocabulary {tokens.vocab_size:,}"
        found = [f"model        {model}: {sizes}, {template} chat template"]
        found += [f"prompts      {lengths.line(policy)}" for lengths in self.prepared.lengths]
        found += [f"episodes     {source}: {_part_line(part)}" for source, part in self.parts.items()]
        found += [f"reward       {_trial_line(trial)}" for trial in self.trials]
        if not self.trials:
            found.append("reward       not tried: judges that join compute it (reward.processes = 0)")
        return found

    def advice(self) -> list[Advice]:
        found = [right_answer_earns(t.source, t.answer, t.problem.place, t.value, t.empty) for t in self.trials]
        found += [wrong_answer_fails(t.source, t.why_empty_fails) for t in self.trials]
        files = {name: m.source for name, m in self.mixture.members.items() if isinstance(m.source, FileSource)}
        found += [few_rows(name, source.num_train) for name, source in files.items()]
        if files and self.config.eval.every:
            found.append(few_held_out(self.num_held_out, self.config.eval.prompts))
        return [advice for advice in found if advice is not None]

    def announce(self, folder: RunFolder) -> None:
        """Prints advice, and how many prompts are left out or cut, and records both as events of the run. Leaves out
        advice that the run has already been given. Moves the log of the reward processes to the run's folder."""
        self.pool.move_log(folder.logs / "rewards.log")
        said = {event["about"] for event in read_events(folder.events_file) if event["event"] == "advice"}
        fresh = [advice for advice in self.advice() if advice.about not in said]
        print_advice(fresh)
        for advice in fresh:
            folder.event("advice", about=advice.about, text=advice.text)
        policy, is_quiet = self.config.rollout.long_prompts, self.config.log.console == "quiet"
        for lengths in self.prepared.lengths:
            if lengths.num_long:
                folder.event(
                    "long_prompts",
                    source=lengths.source,
                    policy=policy,
                    num_long=lengths.num_long,
                    num_prompts=lengths.num_prompts,
                    is_sample=lengths.is_sample,
                    first=lengths.first_long,
                )
                if not is_quiet:
                    print(lengths.line(policy), flush=True)


@asynccontextmanager
async def checking(config: Config, given: Given | None = None, home: Path | None = None) -> AsyncIterator[Checked]:
    """Builds and checks a coordinator's parts, and yields them. The reward processes run until the block ends. Raises
    `UserError` for the first mistake found. The output of rewards goes to a temporary file. After an error, this file
    is kept if the error's message names it.

    `given` is what a Python program adds to the configuration; `home` is the run's folder, if there is one.
    """
    given = given or Given()
    mixture = wiring.make_mixture(config, given.reward, given.functions, home)
    descriptor, name = tempfile.mkstemp(prefix="offbeat-rewards-", suffix=".log")
    os.close(descriptor)
    pool = RewardPool(config.reward.processes, config.reward.timeout_s, mixture.rewards, Path(name))
    try:
        # A log needs no sign of life here: this takes seconds.
        with loading(is_quiet=config.log.console == "quiet" or not sys.stdout.isatty()) as stage:
            stage("trying the rewards")
            importing = asyncio.create_task(asyncio.to_thread(_import_transformers))  # while a reward process starts
            trials = await wiring.try_rewards(config, mixture, pool)
            parts = await episode_parts.describe(config)
            stage("importing transformers, which reads the tokenizer")
            await importing
            with interruptible(), collecting_later():
                num = None if is_hub_name(config.model.path) else num_parameters(config.model.path)
                tokens = wiring.load_tokens(config)
                stage("reading the prompts")
                prepared = prepare(config, mixture, tokens, parts)
        yield Checked(config, mixture, pool, prepared, trials, num, parts)
    except BaseException as error:
        await pool.close()
        if name not in str(error):
            Path(name).unlink(missing_ok=True)
        raise
    await pool.close()
    Path(name).unlink(missing_ok=True)  # unless the log was moved


def _import_transformers() -> None:
    with collecting_later():
        import transformers  # noqa: F401


async def check_roles(config: Config) -> list[str]:
    """Returns lines that name the device and the workers' engine. Raises `UserError` if this machine does not have the
    device, or the engine is not installed."""
    return [*await check_device(config.model.device), *await check_server(config)]


def may_have_gpu() -> bool:
    """Returns whether this machine may have a GPU: it is a Mac, or a GPU's driver is loaded."""
    return sys.platform == "darwin" or engine_choice.has_gpu_driver()


async def check_device(device: str) -> list[str]:
    """Returns a list of one line that names the device. Raises `UserError` if this machine does not have the device."""
    if device not in ("auto", "cpu"):  # torch knows, and is too slow to import here
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PICK_DEVICE, device),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        out, _ = await process.communicate()
        if refusal := out.decode().strip():
            raise UserError(refusal)
    return ["device       cpu (auto)" if device == "auto" and not may_have_gpu() else f"device       {device}"]


async def check_server(config: Config) -> list[str]:
    """Returns a list of one line that names the Python with which workers start their engine's servers; an empty list
    if they start none. Raises `UserError` if the engine is not installed for this Python."""
    rollout = config.rollout
    if rollout.engine not in SERVED or not rollout.workers or config.engine.url is not None:
        return []
    from offbeat.engines.process.commands import environment, probe_interpreter

    machine = await probe_interpreter(config, environment(config, os.environ), counts_gpus=False)
    return [f"engine       {rollout.engine}, in {machine.python}"]


def print_advice(found: Iterable[Advice]) -> None:
    for advice in found:
        print(f"warning: {advice.text}", file=sys.stderr, flush=True)


def _part_line(part: PartInfo) -> str:
    what = ["an environment"] if part.has_environment else []
    if part.tools:
        what.append("tools " + ", ".join(tool.name for tool in part.tools))
    return f"{' and '.join(what)}; {'deterministic' if part.deterministic else 'not deterministic'}"


def _trial_line(trial: wiring.Trial) -> str:
    unknown = "right answer unknown (see task.answer); an empty answer"
    what = unknown if trial.answer is None else f"the right answer, {show(trial.answer)},"
    return f"{trial.reward}: {what} earns {trial.value:g}"
