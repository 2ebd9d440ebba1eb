"""What `offbeat doctor` saw: plain records, as the probes send them and as `--json` prints them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failed:
    """What stands in the place of a record whose probe gave no answer."""

    failed: str
    """Why, in one line."""


@dataclass(frozen=True)
class Offbeat:
    version: str
    commit: str
    """With "and changes" where files differ from it; empty where nobody can tell."""
    folder: str
    python: str
    executable: str
    system: str


@dataclass(frozen=True)
class Package:
    """A Python package that Offbeat asks for."""

    name: str
    wanted: str
    """The versions that will do, such as `<6,>=5.17`; empty for any."""
    found: str | None
    fits: bool
    extra: str = ""
    """The extra that brings it; empty for those that Offbeat cannot do without."""


@dataclass(frozen=True)
class Packages:
    packages: list[Package]
    others: dict[str, str | None]
    """Versions of packages that no extra brings, because few need them; None where one is not installed."""


@dataclass(frozen=True)
class Machine:
    cpu: str
    num_cores: int
    """That this process may use."""
    total_bytes: int | None
    free_bytes: int | None
    max_files: int
    max_files_hard: int
    shm_bytes: int | None
    """Of /dev/shm; None where there is none."""
    shm_free_bytes: int | None
    gpu_drivers: list[str]
    """Makers of GPUs whose driver is loaded, whether or not torch can use it."""
    wall_s: float
    monotonic_moves: bool


@dataclass(frozen=True)
class Device:
    name: str
    model: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    capability: str = ""
    fault: str = ""
    """Why a product of two small matrices did not come out right; empty where it did."""


@dataclass(frozen=True)
class Torch:
    version: str
    build: str
    """Such as `CUDA 12.8` or `CPU`."""
    devices: list[Device]
    picked: str
    """The device that the configuration's model.device means here."""
    refused: str
    """Why it means none."""


@dataclass(frozen=True)
class Interpreter:
    """The Python in which an engine's server would be started."""

    path: str
    python: str
    found: dict[str, str]
    """Versions of vllm, sglang and torch, as far as they are installed there."""


@dataclass(frozen=True)
class EngineServer:
    """What a server says about itself."""

    url: str
    name: str
    dtype: str
    max_context_tokens: int
    has_spans: bool
    has_labels: bool
    is_tempered: bool
    kv_modes: list[str]
    quantisation: str = ""


@dataclass(frozen=True)
class Place:
    """Where runs are kept."""

    folder: str
    total_bytes: int
    free_bytes: int
    network: str | None
    """The kind of network file system that it is."""
    fsync_s: float
    clock_gap_s: float
    """By how much the file system's clock is ahead of this machine's."""


@dataclass(frozen=True)
class Ports:
    loopback_fault: str
    """Why no port of 127.0.0.1 can be listened at; empty where one can."""
    serve_fault: str
    """The same for serve.host and serve.port; empty too where any free port will do."""


@dataclass(frozen=True)
class Model:
    folder: str
    architecture: str
    num_parameters: int
    context_tokens: int | None


@dataclass(frozen=True)
class Mistakes:
    """What `offbeat train` would refuse of a configuration, in its words."""

    mistakes: list[str]


@dataclass(frozen=True)
class Seen:
    offbeat: Offbeat | Failed
    packages: Packages | Failed
    machine: Machine | Failed
    torch: Torch | Failed
    interpreter: Interpreter | Failed
    place: Place | Failed
    ports: Ports | Failed
    model: Model | Failed
    mistakes: Mistakes | Failed
    server: EngineServer | Failed | None = None
    """None where no URL was given."""
