"""The class `Run`, for Python programs and notebooks. `offbeat.train` returns a run; `offbeat.Run(path)` opens one.

A `Run` reads everything from its folder, so it works the same during training, afterwards, and in another program.
"""

from __future__ import annotations

import contextvars
import html
import io
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from offbeat.config import Config, load
from offbeat.config.schema import RunConfig
from offbeat.errors import DeadlineError, UserError
from offbeat.extras import import_extra
from offbeat.launch import arguments
from offbeat.launch.given import Given
from offbeat.launch.run_folder import (
    CONFIG,
    LOCK,
    METRICS,
    SUMMARY,
    check_resumable,
    named_run,
    refuse_in_use,
    refuse_trainer_elsewhere,
    stored_config,
)
from offbeat.launch.stopping import WAKE_EVERY_S, StopButton
from offbeat.observability.metric_files import read_metrics
from offbeat.observability.sinks import GivenSink

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from offbeat.observability.console import Console
    from offbeat.tools.page.background import BackgroundPage

Reward = Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | Mapping[str, Any]
ROWS = "tasks"
"""Name of the folder, inside the run's folder, for rows of tasks that were given from Python."""


class Run:
    """A run: reads its results, and evaluates, exports, resumes or stops it. `path` is the run's folder."""

    path: Path
    _page: BackgroundPage | None = None

    def __init__(self, path: str | Path):
        """Opens the run in folder `path`, whether it has ended or not."""
        stored_config(Path(path))
        self.path = Path(path).absolute()
        self._training: _Training | None = None
        self._given: dict[str, Any] = {}
        self._functions: Mapping[str, Callable[..., Any]] = {}

    @classmethod
    def _train(cls, config: Any, **given: Any) -> Self:
        """Trains a new run, or one to resume; see `offbeat.train` for the parameters."""
        run = cls.__new__(cls)
        run._start(config, **given)
        return run

    def _start(
        self,
        config: Any,
        *,
        task: Any = None,
        reward: Reward | None = None,
        callbacks: Sequence[Callable[[dict[str, Any]], Any]] | Callable[[dict[str, Any]], Any] = (),
        loggers: Any = (),
        resume: str | Path | Run | None = None,
        wait: bool = True,
        **overrides: Any,
    ) -> None:
        training = _Training()
        home = _run_to_resume(resume)
        with tempfile.TemporaryDirectory(prefix="offbeat-") as scratch:
            rows = Path(scratch).resolve() / ROWS
            rows.mkdir()
            prepared = arguments.prepare(config, overrides, task=task, reward=reward, resume=home, rows=rows)
            # Only now, so that arguments that were refused change nothing.
            self._given = {"reward": reward, "callbacks": callbacks, "loggers": loggers}
            if prepared.functions:
                self._given["task"] = list(prepared.functions.values())
            self._functions, self._training = prepared.functions, training
            press = training.button.press
            given = Given(
                prepared.reward,
                prepared.functions,
                rows if any(rows.iterdir()) else None,
                [
                    *(GivenSink(callback, press, is_logger=False) for callback in _several(callbacks)),
                    *(GivenSink(logger, press, is_logger=True) for logger in _several(loggers)),
                ],
                training.button,
                self._begun,
                training.show,
                from_python=True,
            )
            training.start(lambda: _launch(prepared.config, given, home), wait=wait)

    def _begun(self, path: Path) -> None:
        self.path = path.absolute()
        assert self._training is not None
        self._training.begun.set()

    @property
    def config(self) -> Config:
        """Configuration of the run, with all its keys."""
        return load(self.path / CONFIG)

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of the whole run, as in summary.json: rewards, speed, why it stopped. Empty until training first
        ends. While a resumed run trains, these are the figures from before the resume."""
        file = self.path / SUMMARY
        return json.loads(file.read_text()) if file.is_file() else {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step, as in metrics.jsonl, without steps that a resume undid. Rows of evaluated steps have
        `eval_mean@k`, the mean held-out reward of k answers per prompt. A row of step 0 is the evaluation before
        training."""
        return read_metrics(self.path / METRICS)

    def frame(self) -> Any:
        """Returns the metrics as a pandas data frame. The steps are in the column `step`, and in the index."""
        frame = import_extra("pandas", "notebook", "Run.frame").DataFrame(self.metrics)
        return frame.set_index("step", drop=False).rename_axis(None)

    def plot(self) -> Figure:
        """Returns a matplotlib figure of training and held-out reward, which a notebook shows."""
        import_extra("matplotlib", "plot", "Run.plot")
        from offbeat.observability.plot import draw_rewards

        rows = self.metrics
        if not any(row.get("reward") is not None for row in rows):
            raise UserError(f"{self.path}: has no reward to plot yet; wait for the first step")
        figure = draw_rewards(rows, self.path.name)
        assert figure is not None
        setattr(figure, "_repr_png_", lambda: _png(figure))  # noqa: B010 - for notebooks without %matplotlib
        return figure

    def page(self, *others: Run | str | Path) -> BackgroundPage:
        """Returns the page of this run, with its curves, answers, time line, workers and events, which a notebook shows
        in a frame and whose `url` a browser opens. `others` are runs, or their folders, whose curves are laid over
        those of this one. The page is served by this process until it ends, or until the page's `close()`."""
        from offbeat.tools.page.background import BackgroundPage

        paths = [self.path, *(other.path if isinstance(other, Run) else Run(other).path for other in others)]
        if self._page is None or self._page.paths != paths or not self._page.is_open:
            self._page = BackgroundPage(paths, is_framed=True)
        return self._page

    def trajectories(
        self,
        *,
        purpose: Literal["train", "eval"] | None = None,
        step: int | None = None,
        source: str | None = None,
        worker: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        failed: bool | None = None,
        limit: int | None = None,
        newest_first: bool = True,
    ) -> list[dict[str, Any]]:
        """Returns answers as dicts, each with its prompt, right answer, reward, the reward's parts, and step. The
        filters are those of `offbeat show`. In a dict, `task` is the ID that `offbeat show RUN ID` takes.
        `pandas.DataFrame(run.trajectories())` makes a table."""
        from offbeat.tools.trajectories import read_trajectories

        return read_trajectories(
            self.path,
            purpose=purpose,
            step=step,
            source=source,
            worker=worker,
            min_reward=min_reward,
            max_reward=max_reward,
            failed=failed,
            limit=limit,
            newest_first=newest_first,
        )

    def evaluate(
        self, *, prompts: int | None = None, samples: int | None = None, reward: Reward | None = None
    ) -> dict[str, float]:
        """Returns mean@k and pass@k of the newest weights on the run's held-out problems. `prompts` and `samples`
        replace `eval.prompts` and `eval.samples`. Rewards given to `offbeat.train` are used again; for a run that was
        opened from disk, give them as `reward`."""
        from offbeat.tools.evaluate import evaluate_run

        chosen, _ = arguments.read_reward(self._given.get("reward") if reward is None else reward)
        return evaluate_run(self.path, prompts=prompts, samples=samples, reward=chosen, functions=self._functions)

    def export(self, folder: str | Path) -> Path:
        """Writes the newest weights as a Hugging Face model to the new folder `folder`, and returns that folder."""
        from offbeat.tools.export import export_run

        export_run(self.path, Path(folder))
        return Path(folder)

    def resume(self, *, steps: int | None = None, wait: bool = True, **changes: Any) -> Self:
        """Trains on until the run has `steps` steps in all (None: `run.steps`), and returns this run.

        Rewards, callbacks, loggers and functions from Python are used again, unless `changes` has new ones. `changes`
        are arguments of `offbeat.train`; keys that are fixed for the life of a run are refused.
        """
        if self.is_running:
            raise UserError(f"{self.path}: is training already; stop it first, or wait for its end")
        self._start(
            None,
            resume=self.path,
            wait=wait,
            **{**self._given, **({} if steps is None else {"steps": steps}), **changes},
        )
        return self

    @property
    def is_running(self) -> bool:
        """Whether this object is training the run. False if another object or program trains it."""
        return self._training is not None and not self._training.ended.done()

    def stop(self) -> Self:
        """Ends training after the current step, with a checkpoint, and waits until training has ended. Does not wait
        when called in a callback, which is part of a step. Raises `UserError` if another program trains the run."""
        if self._training is None:
            if (self.path / LOCK).exists():
                refuse_in_use(self.path)  # another program's run: it must be stopped there
            return self
        self._training.button.press("stop()")
        if not self._training.is_own_thread():
            self._training.wait(None)
        return self

    def wait(self, timeout: float | None = None) -> Self:
        """Waits until training ends, `timeout` seconds at most, and returns the run. In a notebook, the cell shows the
        newest steps and the reward curve meanwhile. Raises the error that ended training, or `TimeoutError`. Ctrl-C
        stops the run with a checkpoint; a second Ctrl-C ends only the waiting."""
        if self._training is not None and not self._training.wait(timeout, shows=True):
            raise DeadlineError(f"{self.path}: is still training after {timeout:g} s")
        return self

    def __repr__(self) -> str:
        return f"<offbeat.Run {self.path}: {self._state()}>"

    def _repr_html_(self) -> str:
        from offbeat.observability.console import closing_lines

        names = ("reward", "held-out", "time")
        shown = [(name, text) for name, text in closing_lines(self.summary, "") if name in names]
        cells = [("run", str(self.path)), ("state", self._state()), *shown]
        return "".join(("<table>", *(f"<tr><th>{n}</th><td>{html.escape(t)}</td></tr>" for n, t in cells), "</table>"))

    def _state(self) -> str:
        last = max((row["step"] for row in self.metrics), default=0)
        step, summary = f"step {last} of {self.config.run.steps}", self.summary
        if self.is_running:
            return f"training, {step}"
        if self._training is not None and (error := self._training.ended.exception()) is not None:
            return f"failed, {step}: {error}"
        if not summary:
            return f"not finished, {step}"
        return f"finished, {step}" if summary["finished"] else f"stopped by {summary['stopped_by']}, {step}"


def _run_to_resume(resume: str | Path | Run | None) -> Path | None:
    """Returns the folder of the run to resume; None for a new run (`resume` is None). `resume` is a `Run`, a folder, or
    the name of a run in the default `run.dir`. Raises `UserError` if there is no such run."""
    if resume is None or isinstance(resume, Run):
        return None if resume is None else resume.path
    folder = named_run(str(resume), Path(RunConfig().dir))
    stored_config(folder)
    return folder


def _several(given: Any) -> list[Any]:
    """Returns a list of the callbacks or loggers in `given`, which may also be a single callback or logger."""
    is_one = callable(given) or hasattr(given, "log") or isinstance(given, str | Mapping)
    return [given] if is_one or not isinstance(given, Iterable) else list(given)


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()


class _Training:
    """Training by this program, either in the thread that calls `start` or in a new thread."""

    def __init__(self) -> None:
        self.button = StopButton()
        self.begun = threading.Event()
        """Set once the run has a folder, or has failed before it got one."""
        self.ended: futures.Future[None] = futures.Future()
        self._thread = threading.current_thread()
        self._is_alone = False
        """Whether training has a thread of its own. Its error is then printed, because nobody may be waiting for it."""
        self._console: Console | None = None

    def start(self, work: Callable[[], object], *, wait: bool) -> None:
        """Calls `work`. With `wait`, returns when `work` ends. Otherwise, `work` runs in a new thread, and `start`
        returns once the run has a folder. If `work` has failed by then, its error is raised."""
        if wait:
            self._do(work)
        else:
            context = contextvars.copy_context()
            self._is_alone = True
            self._thread = threading.Thread(target=context.run, args=(self._do, work), name="offbeat-train")
            self._thread.start()
            try:
                self.begun.wait()
            except BaseException:
                self.button.press("SIGINT")
                raise
        if self.ended.done():
            self.ended.result()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `start` or `wait`
            self.ended.set_exception(error)
            if self._is_alone and self.begun.is_set():
                print(f"offbeat: training has failed: {error}; wait() raises this error", file=sys.stderr, flush=True)
        else:
            self.ended.set_result(None)
        finally:
            self.begun.set()

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def show(self, console: Console) -> None:
        """Sets the run's console, whose content `wait` then shows in a notebook."""
        self._console = console

    def wait(self, timeout: float | None, *, shows: bool = False) -> bool:
        """Waits for the end of training and raises its error, if there was one. Returns False if the end does not come
        within `timeout` seconds (None: no limit). A first Ctrl-C only asks training to stop; a second Ctrl-C raises
        `KeyboardInterrupt`. `shows`: whether a notebook's cell shows the run's console meanwhile."""
        end_s = math.inf if timeout is None else time.monotonic() + timeout
        redraw = self._drawn_here() if shows else None
        is_asked = False
        while not self.ended.done():
            try:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return False
                futures.wait([self.ended], min(left_s, WAKE_EVERY_S))
                if redraw is not None:
                    redraw()
            except KeyboardInterrupt:
                if is_asked:
                    raise
                is_asked = True
                self.button.press("SIGINT")
        if redraw is not None:
            redraw()
        self.ended.result()
        return True

    def _drawn_here(self) -> Callable[[], None] | None:
        """Returns a function that draws the present content of the run's console in the current notebook cell. Returns
        None outside a notebook. Also returns None if training was started with `wait`, because the cell that started
        the training has shown the console."""
        from offbeat.observability.console import in_notebook

        if not self._is_alone or not in_notebook():
            return None
        from offbeat.observability.notebook import NotebookConsole, Output

        output = Output()

        def redraw() -> None:
            if isinstance(self._console, NotebookConsole) and self._console.data is not None:
                output.show(self._console.data)

        return redraw


def _launch(config: Config, given: Given, resume: Path | None) -> None:
    """Trains in this process, or with worker processes if `rollout.workers` says so."""
    from offbeat.launch.engine_choice import announce, with_chosen_engine

    if resume:
        refuse_trainer_elsewhere(resume)
    config, choice = with_chosen_engine(check_resumable(resume, config) if resume else config)
    announce(choice, config)
    if config.rollout.workers is None:
        from offbeat.launch import local

        local.train(config, given=given, resume=resume)
    else:
        from offbeat.launch import engine_parts, stopping, supervisor

        engine_parts.check_engine(config, config.rollout.workers)
        stopping.run(supervisor.train(config, given, resume=resume))
