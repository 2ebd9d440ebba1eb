"""Samples and groups as a schedule sees them: the tokens of each version, but never the final lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.partial.laws import PROMPT_TOKENS


@dataclass(eq=False)
class Sample:
    """One answer in progress; `spans` holds the number of its tokens by version, oldest first."""

    group: Group = field(repr=False)
    member: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0
    is_done: bool = False
    kv_version: int | None = None
    """Oldest version in the sample's keys and values in the engine; None if the engine has none."""

    @property
    def samples(self) -> list[Sample]:
        return [self]

    @property
    def num_context_tokens(self) -> int:
        return PROMPT_TOKENS + self.num_tokens

    @property
    def oldest_version(self) -> int | None:
        return self.spans[0][0] if self.spans else None

    def grow(self, num_tokens: int, version: int) -> None:
        if num_tokens == 0:
            return
        self.num_tokens += num_tokens
        if self.spans and self.spans[-1][0] == version:
            num_tokens += self.spans.pop()[1]
        self.spans.append((version, num_tokens))


@dataclass(eq=False)
class Group:
    """The samples of one prompt in one epoch; groups are numbered in the order in which they began."""

    number: int
    prompt: int
    epoch: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(sample.is_done for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token in the group."""
        return min((sample.spans[0][0] for sample in self.samples if sample.spans), default=None)
