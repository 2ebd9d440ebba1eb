"""The join file of a run: all that a machine needs to join it, in one file that only its owner can read.

It holds the coordinator's URL, the run's certificate and a fleet token. `offbeat train --join-file FILE` writes it when
the run is ready; `offbeat node --join-file FILE` waits for it.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from offbeat.config.schema import SERVED, Config
from offbeat.errors import DeadlineError, UserError
from offbeat.files import write_atomic
from offbeat.launch.address import address_of
from offbeat.launch.join_line import HOST, far_url, is_self_signed
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role

MINUTES = 7 * 24 * 60.0
"""Minutes for which the token is valid: as long as a token may be, because nodes join while the run goes on."""
USES = 256
"""Workers that the token lets in. One that comes back with its folder needs no token again."""
LOOK_EVERY_S = 0.2


class JoinFile(msgspec.Struct, frozen=True):
    """What a machine needs to join a run. `repr` hides the token."""

    url: str
    token: str
    certificate: str | None = None
    """The coordinator's certificate as PEM, if only members of the run know that it can be trusted."""
    allow_plain: bool = False
    """Whether secrets may be sent to `url` without TLS."""
    gpus_per_worker: int = 1

    def __repr__(self) -> str:
        return f"JoinFile(url={self.url!r})"


def write(file: Path, run: Path, url: str, config: Config) -> None:
    """Writes the join file of the run in folder `run`, which is served at `url`."""
    address = address_of(config, run)
    far = far_url(url, address)
    if HOST in far:
        raise UserError(
            f"--join-file {file}: the run is behind a proxy, whose address is not known here; give nodes its URL with "
            "--join, and a token with --token-file"
        )
    with Ledger(run / "ledger.sqlite", must_exist=True) as ledger, ledger.naming_damage():
        token = ledger.issue_token(Role.ROLLOUT, MINUTES, USES)
    own = address.certificate if address.certificate is not None and is_self_signed(address.certificate) else None
    known = JoinFile(
        url=far,
        token=token,
        certificate=own.read_text() if own is not None else None,
        allow_plain=address.is_plain,
        gpus_per_worker=config.engine.tensor_parallel if config.rollout.engine in SERVED else 1,
    )
    try:
        write_atomic(file, msgspec.json.format(msgspec.json.encode(known)), mode=0o600)
    except OSError as error:
        raise UserError(f"--join-file {file} cannot be written: {error.strerror}; give another file") from error


def read(file: Path, within_s: float) -> JoinFile:
    """Returns the content of a join file, once it is there."""
    deadline_s = time.monotonic() + within_s
    while not file.is_file():
        if time.monotonic() > deadline_s:
            raise DeadlineError(
                f"--join-file {file}: not there after {within_s:.0f} s; the run that writes it (offbeat train "
                "--join-file) has not become ready"
            )
        time.sleep(LOOK_EVERY_S)
    if file.stat().st_mode & 0o077:
        raise UserError(f"--join-file {file}: other users can read the token in it; run chmod 600 {file}")
    try:
        return msgspec.json.decode(file.read_bytes(), type=JoinFile)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"--join-file {file}: is no join file ({error}); copy the one that offbeat train --join-file wrote"
        ) from error
