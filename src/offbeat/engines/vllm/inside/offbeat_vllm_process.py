"""vLLM's engine at a Unix socket, without HTTP, JSON or text: `python -m offbeat_vllm_process --socket PATH OPTIONS`.

`OPTIONS` are those of vLLM's own server that concern the engine. One thread runs the engine's steps and, between two of
them, reads and answers messages (`offbeat_frames`). So every message finds the engine at rest, and every token is known
to come from the weights that were there when its step began: before weights change, all steps in flight are completed.

An exception in a step ends the process, with its traceback in the log; the worker starts another one.
"""

from __future__ import annotations

import fcntl
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from offbeat_frames import Abort, Answer, Ask, Frames, Generate, Part, Parts, frame, to_engine
from vllm import SamplingParams
from vllm import __version__ as release
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

READ_BYTES = 2**20
NO_LOGPROB = -9998.0
"""A log-prob below this means that the engine has none for the token."""


class Client:
    """A worker's connection. Bytes that its socket does not take at once wait in `unsent`."""

    def __init__(self, connection: socket.socket):
        self.connection, self.frames, self.unsent = connection, Frames(), bytearray()
        self.is_gone = False

    def read(self) -> Iterable[bytes]:
        """Yields the bodies of all frames that have come."""
        try:
            while piece := self.connection.recv(READ_BYTES):
                yield from self.frames.feed(piece)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            print(f"offbeat: a worker's connection is closed: {error}", flush=True)
        self.is_gone = True

    def send(self, content: bytes = b"") -> None:
        """Appends `content` to `unsent`, and sends as much of that as the socket takes at once."""
        self.unsent += content
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.is_gone = True


class Running:
    """An answer in progress: its tokens that are not sent yet, and which weights sampled which tokens."""

    def __init__(self, client: Client, id: str):
        self.client, self.id = client, id
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.num_tokens = 0
        self.starts: list[tuple[str, int]] = []
        """Labels of the weights that sampled the answer, each with the index of the first token that they sampled."""
        self.num_cached: int | None = None

    def take(self, output: EngineCoreOutput, label: str) -> None:
        tokens = output.new_token_ids
        if not tokens:
            return
        if not self.starts or self.starts[-1][0] != label:
            self.starts.append((label, self.num_tokens))
        self.num_tokens += len(tokens)
        self.tokens += tokens
        if (found := output.new_logprobs) is None or min(values := found.logprobs[:, 0].tolist()) < NO_LOGPROB:
            raise RuntimeError(f"request {self.id}: the engine has no log-prob of a token that it sampled")
        self.logprobs += values
        if (stats := output.prefill_stats) is not None:
            self.num_cached = stats.num_cached_tokens

    def part(self, finish: str = "") -> Part:
        """Returns the tokens that are not sent yet as a part. `finish` is why the answer has ended; "" if it has
        not."""
        spans: list[tuple[str, int, int]] = []
        if finish:
            bounds = [*(start for _, start in self.starts), self.num_tokens]
            spans = [(label, start, end) for (label, start), end in zip(self.starts, bounds[1:], strict=True)]
        part = Part(self.id, self.tokens, self.logprobs, finish, spans, self.num_cached)
        self.tokens, self.logprobs, self.num_cached = [], [], None
        return part


class Process:
    """Runs the engine and answers its clients' messages."""

    def __init__(self, core: EngineCore, listener: socket.socket):
        self.core, self.listener = core, listener
        self.label = ""
        """Label of the weights; "" before the first load."""
        self.part_tokens = max(core.vllm_config.scheduler_config.stream_interval, 1)
        self.clients: list[Client] = []
        self.running: dict[str, Running] = {}
        self.adapters: dict[str, LoRARequest] = {}
        self.num_adapters = 0
        self.sockets = selectors.DefaultSelector()
        self.sockets.register(listener, selectors.EVENT_READ)
        self.answers: dict[str, Callable[..., Any]] = {
            "facts": self.facts,
            "label": lambda: self.label,
            "pause": self.pause,
            "resume": self.resume,
            "call": self.call,
            "rename": self.rename,
            "add_adapter": self.add_adapter,
            "remove_adapter": self.remove_adapter,
        }

    def run(self) -> None:
        while True:
            self.exchange(waits=not self.has_work)
            if self.has_work:
                self.step()
            self.tend()

    @property
    def has_work(self) -> bool:
        return bool(self.core.batch_queue) or self.core.scheduler.has_requests()

    # Messages

    def exchange(self, *, waits: bool) -> None:
        """Reads and answers messages; with `waits`, sleeps until there is one, or until a client takes more bytes."""
        for key, events in self.sockets.select(None if waits else 0):
            if key.fileobj is self.listener:
                self.connect()
                continue
            client: Client = key.data
            if events & selectors.EVENT_WRITE:
                client.send()
            if events & selectors.EVENT_READ:
                for body in client.read():
                    self.take(client, body)

    def connect(self) -> None:
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        client = Client(connection)
        self.clients.append(client)
        self.sockets.register(connection, selectors.EVENT_READ, client)

    def tend(self) -> None:
        """Makes `exchange` wait for each client's messages, and for room in its socket if bytes are left to send.
        Forgets clients that are gone, and ends their answers."""
        for client in self.clients:
            if client.is_gone:
                self.sockets.unregister(client.connection)
                client.connection.close()
                left = [running.id for running in self.running.values() if running.client is client]
                self.core.abort_requests(left)
                for id in left:
                    del self.running[id]
            else:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
                self.sockets.modify(client.connection, events, client)
        self.clients = [client for client in self.clients if not client.is_gone]

    def take(self, client: Client, body: bytes) -> None:
        message = to_engine.decode(body)
        if isinstance(message, Generate):
            self.generate(client, message)
        elif isinstance(message, Abort):
            self.abort(message.ids)
        else:
            client.send(frame(self.answered(message)))

    def answered(self, ask: Ask) -> Answer:
        try:
            return Answer(ask.number, self.answers[ask.name](**ask.arguments))
        except Exception as error:  # noqa: BLE001 - the client decides whether the engine can go on
            return Answer(ask.number, error=f"{type(error).__name__}: {error}")

    # Answers

    def generate(self, client: Client, message: Generate) -> None:
        try:
            sampling = SamplingParams(
                max_tokens=message.max_new_tokens,
                temperature=message.temperature,
                top_p=message.top_p,
                top_k=message.top_k,
                min_p=message.min_p,
                seed=message.seed,
                logprobs=0,  # of the sampled token alone
                stop_token_ids=message.stop_token_ids,
                ignore_eos=True,  # `stop_token_ids` names all tokens that end an answer
                detokenize=False,
            )
            request = EngineCoreRequest(
                request_id=message.id,
                prompt_token_ids=message.tokens,
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=self.adapters[message.adapter] if message.adapter else None,
                cache_salt=message.salt,
                data_parallel_rank=None,
            )
            self.core.add_request(*self.core.preprocess_add_request(request))
        except Exception as error:  # noqa: BLE001 - concerns this request alone
            client.send(frame(Parts([Part(message.id, error=f"{type(error).__name__}: {error}")])))
        else:
            self.running[message.id] = Running(client, message.id)

    def abort(self, ids: Sequence[str]) -> None:
        ended = [self.running.pop(id) for id in ids if id in self.running]
        self.core.abort_requests([running.id for running in ended])
        self.send((running.client, running.part("abort")) for running in ended)

    def step(self) -> None:
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        if outputs:
            self.send(self.parts([output for group in outputs.values() for output in group.outputs]))

    def parts(self, outputs: Sequence[EngineCoreOutput]) -> Iterable[tuple[Client, Part]]:
        """Yields the parts to send after a step: one for each answer that has ended or has at least `part_tokens`
        unsent tokens."""
        for output in outputs:
            if (running := self.running.get(output.request_id)) is None:  # aborted while the step ran
                continue
            running.take(output, self.label)
            if output.finish_reason is not None:
                del self.running[running.id]
                yield running.client, running.part(str(output.finish_reason))
            elif len(running.tokens) >= self.part_tokens:
                yield running.client, running.part()

    def send(self, parts: Iterable[tuple[Client, Part]]) -> None:
        """Sends each client its parts, in one frame."""
        by_client: dict[Client, list[Part]] = {}
        for client, part in parts:
            by_client.setdefault(client, []).append(part)
        for client, chosen in by_client.items():
            client.send(frame(Parts(chosen)))

    # Everything else that a client may ask for

    def facts(self) -> dict[str, Any]:
        config = self.core.vllm_config
        model, lora = config.model_config, config.lora_config
        return {
            "release": release,
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantisation": model.quantization or "",
            "max_context_tokens": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
            "is_on_cpu": "cpu" in str(config.device_config.device_type),
            "lora_rank": lora.max_lora_rank if lora else 0,
        }

    def pause(self, keeps_kv: bool) -> None:
        """Completes the steps in flight and starts no more. Unless `keeps_kv`, drops all keys and values; running
        requests compute theirs again after `resume`."""
        self.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self.core.batch_queue:
            self.step()
        if not keeps_kv:
            self.core.reset_prefix_cache(reset_running_requests=True)

    def resume(self) -> None:
        self.core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def call(self, method: str, arguments: dict[str, Any]) -> None:
        """Calls a method of vLLM's workers, which hold the weights."""
        self.core.collective_rpc(method, kwargs=arguments)

    def rename(self, label: str) -> None:
        self.label = label

    def add_adapter(self, name: str, folder: str) -> None:
        """Makes vLLM read the adapter in `folder`. Gives it a new number, by which vLLM tells adapters apart. `name`
        must not be in use."""
        self.num_adapters += 1
        adapter = LoRARequest(name, self.num_adapters, folder)
        self.core.add_lora(adapter)
        self.adapters[name] = adapter

    def remove_adapter(self, name: str) -> None:
        if (adapter := self.adapters.pop(name, None)) is not None:
            self.core.remove_lora(adapter.lora_int_id)


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Waits for the lock on a file, and holds it during the `with` block. The trainer on the same GPU takes the same
    lock while it takes memory."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = FlexibleArgumentParser(prog="offbeat_vllm_process")
    parser.add_argument("--socket", required=True, help="path of the socket to listen at")
    parser.add_argument("--memory-lock", help="file to lock while the engine takes its memory")
    options = EngineArgs.add_cli_args(parser).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = EngineArgs.from_cli_args(options).create_engine_config(UsageContext.LLM_CLASS)
    with locked(options.memory_lock) if options.memory_lock else nullcontext():
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(options.socket)
            listener.listen()
            listener.setblocking(False)
            Process(core, listener).run()
    finally:
        core.shutdown()


if __name__ == "__main__":  # vLLM's workers may be spawned and import this module
    main()
