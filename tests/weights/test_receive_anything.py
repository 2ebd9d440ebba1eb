"""Receivers under whatever can happen between a publisher's disk and theirs, in any order.

Pieces and manifests are lost, bits flip at the source and here, lines break, processes are replaced. A fetch returns
bit by bit what was published or raises an error that Offbeat foresaw; once the source is mended, it returns.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from published import Faulty, Run, flip

from offbeat.errors import OffbeatError
from offbeat.weights.receive import Receiver

MAX_VERSIONS = 9
MAX_RECEIVERS = 3
ANY = st.integers(min_value=0, max_value=10**6)


class Receiving(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.run = Run(self.folder, every=3)
        self.receivers: list[Receiver] = []
        self.sources: list[Faulty] = []
        self.pristine: dict[Path, bytes] = {}

    def teardown(self):
        shutil.rmtree(self.folder)

    @initialize()
    def begin(self):
        self.publish(50)
        self.join(has_copy=False)

    # --- what a run does ---

    @precondition(lambda self: len(self.run.versions) < MAX_VERSIONS)
    @rule(num_changed=st.sampled_from([0, 1, 50, 3000]))
    def publish(self, num_changed):
        self.run.publish(num_changed)
        for path in self.at_source():
            if path not in self.pristine:
                self.pristine[path] = path.read_bytes()

    @precondition(lambda self: len(self.receivers) < MAX_RECEIVERS)
    @rule(has_copy=st.booleans())
    def join(self, has_copy):
        self.sources.append(Faulty(self.run.store))
        self.receivers.append(self.start(len(self.receivers), has_copy))

    @rule(who=ANY, how_old=st.integers(min_value=0, max_value=3))
    def fetch(self, who, how_old):
        version = self.run.versions[max(len(self.run.versions) - 1 - how_old, 0)]
        told = ""
        try:
            here = asyncio.run(self.receivers[who % len(self.receivers)].fetch(version))
        except OffbeatError as error:
            told = str(error)
        if told:
            assert f"version {version.number}" in told or told == "the line is down"
        else:
            self.run.check(here, version)

    # --- what happens to it ---

    @precondition(lambda self: self.at_source())
    @rule(which=ANY, is_lost=st.booleans(), position=ANY)
    def harm_the_source(self, which, is_lost, position):
        files = self.at_source()
        path = files[which % len(files)]
        data = bytearray(path.read_bytes())
        data[position % len(data)] ^= 0x10
        path.unlink()
        if not is_lost:
            path.write_bytes(data)  # another file: what the publisher holds open is its own affair

    @rule(who=ANY, which=ANY, position=ANY, is_cut=st.booleans(), is_replaced=st.booleans())
    def harm_a_receiver(self, who, which, position, is_cut, is_replaced):
        """Who goes on sees that a file was written to; what a disk does by itself is found by who starts anew."""
        who %= len(self.receivers)
        files = sorted(path for path in self.receivers[who].cache.folder.rglob("*") if path.is_file())
        files = [path for path in files if path.stat().st_size]
        if files:
            path = files[which % len(files)]
            if is_cut:
                path.write_bytes(path.read_bytes()[: position % path.stat().st_size])
            else:
                flip(path, position, keep_time=is_replaced)
        if is_replaced:
            self.receivers[who] = self.start(who, self.receivers[who]._copy is not None)

    @rule(who=ANY, num_pieces=st.integers(min_value=0, max_value=3), num_bytes=ANY)
    def break_the_line_of(self, who, num_pieces, num_bytes):
        """The next pieces arrive, then one in part."""
        left = [num_pieces]

        def cut(digest: str, path: Path) -> None:
            left[0] -= 1
            if left[0] == -1:
                path.write_bytes(path.read_bytes()[: num_bytes % path.stat().st_size])
                raise OffbeatError("the line is down")

        self.sources[who % len(self.sources)].harm = cut

    @rule()
    def mend_the_source(self):
        for path, data in self.pristine.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for sources, receiver in zip(self.sources, self.receivers, strict=True):
            sources.harm = lambda digest, path: None
            version = self.run.versions[-1]
            self.run.check(asyncio.run(receiver.fetch(version)), version)

    # --- helpers ---

    def start(self, who: int, has_copy: bool) -> Receiver:
        copy = self.copy if has_copy else None
        return self.run.receiver(f"worker{who}", sources=self.sources[who], copy=copy)

    async def copy(self, number: int, into: Path) -> None:
        try:
            await self.run.copy(number, into)
        except FileNotFoundError:
            raise OffbeatError(f"version {number}: nobody has a copy") from None

    def at_source(self) -> list[Path]:
        published = self.folder / "published"
        return sorted(path for path in [*self.run.store_files(), *published.rglob("*.safetensors")] if path.is_file())


TestReceiving = Receiving.TestCase
TestReceiving.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
