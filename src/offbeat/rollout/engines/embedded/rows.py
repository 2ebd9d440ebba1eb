"""What a decode step must know of each slot, in tensors: one row a slot.

Nothing here loops over requests while they run: a row is written when its request starts, moved when slots are
compacted, and read back when the request ends. Between those, `advance` is the whole bookkeeping of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from offbeat.rollout.engine import Request
from offbeat.rollout.engines.embedded.sampling import RowSampling, noise_key

POSITION, LIMIT, PROMPT, KNOWN, ALIVE, KEY, TOP_K = range(7)
"""Columns of the integer state: index of the token that the next step feeds, length at which to end, length of the
prompt, number of tokens that are given and not sampled, 1 in live rows, noise key, top-k."""
TEMPERATURE, TOP_P, MIN_P = range(3)
"""Columns of the float state."""
NEVER = 2**62


class Rows:
    """See the module. Each row's tokens and log-probs lie at the token's index in prompt + response."""

    def __init__(self, num_slots: int, max_context_tokens: int, dtype: torch.dtype, device: torch.device):
        self.device = device
        self.tokens = torch.zeros((num_slots, max_context_tokens), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros((num_slots, max_context_tokens), dtype=torch.float32, device=device)
        self.mask = torch.full((num_slots, max_context_tokens), -torch.inf, dtype=dtype, device=device)
        """Added to attention scores: 0 where the row may look."""
        self.ints = torch.zeros((num_slots, 7), dtype=torch.int64, device=device)
        self.floats = torch.ones((num_slots, 3), dtype=torch.float32, device=device)
        self.stops = torch.full((num_slots, 1), -1, dtype=torch.int64, device=device)
        self.clear(range(num_slots), [0] * num_slots)

    def clear(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Makes rows dead: they may run along, stay at their positions, before which nothing changes, and never end."""
        rows = self.index(slots)
        self.ints[rows] = 0
        self.ints[rows, POSITION] = self.index(positions)
        self.ints[rows, LIMIT] = NEVER
        self.floats[rows] = 1.0
        self.stops[rows] = -1

    def start(self, slots: Sequence[int], requests: Sequence[Request], positions: Sequence[int]) -> None:
        """Writes requests into slots; each will feed the token at its position first."""
        num_stops = max(len(request.sampling.stop_token_ids) for request in requests)
        if num_stops > self.stops.shape[1]:
            self.stops = torch.nn.functional.pad(self.stops, (0, num_stops - self.stops.shape[1]), value=-1)
        longest = max(len(request.tokens) for request in requests)
        tokens = np.zeros((len(slots), longest), np.int64)
        ints = np.zeros((len(slots), self.ints.shape[1]), np.int64)
        floats = np.ones((len(slots), self.floats.shape[1]), np.float32)
        stops = np.full((len(slots), self.stops.shape[1]), -1, np.int64)
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            sampling, known = request.sampling, len(request.tokens)
            limit, prompt = known + sampling.max_new_tokens, known - request.position
            tokens[row, :known] = request.tokens
            ints[row] = (position, limit, prompt, known, 1, noise_key(request.seed), sampling.top_k)
            floats[row] = (sampling.temperature, sampling.top_p, sampling.min_p)
            stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        rows = self.index(slots)
        self.tokens[rows, :longest] = torch.from_numpy(tokens).to(self.device)
        self.ints[rows] = torch.from_numpy(ints).to(self.device)
        self.floats[rows] = torch.from_numpy(floats).to(self.device)
        self.stops[rows] = torch.from_numpy(stops).to(self.device)
        self._show(rows, positions)

    def restart(self, slots: Sequence[int], positions: Sequence[int], known: Sequence[int]) -> None:
        """Sends live rows back to feed again from a position, keeping what they have sampled."""
        rows = self.index(slots)
        self.ints[rows, POSITION] = self.index(positions)
        self.ints[rows, KNOWN] = self.index(known)
        self._show(rows, positions)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source, target = self.index(sources), self.index(targets)
        for tensor in (self.tokens, self.logprobs, self.mask, self.ints, self.floats, self.stops):
            tensor[target] = tensor[source]

    def read(self, slots: Sequence[int], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The first tokens of some rows and their log-probs, on the host."""
        rows = self.index(slots)
        return self.tokens[rows, :num_tokens].cpu().numpy(), self.logprobs[rows, :num_tokens].cpu().numpy()

    def positions(self, num_rows: int) -> torch.Tensor:
        return self.ints[:num_rows, POSITION]

    def response_positions(self, num_rows: int) -> torch.Tensor:
        """Where in its response each row's next token will stand."""
        return self.ints[:num_rows, POSITION] + 1 - self.ints[:num_rows, PROMPT]

    def sampling(self, num_rows: int, any_greedy: bool, any_filtered: bool) -> RowSampling:
        floats = self.floats[:num_rows]
        return RowSampling(
            keys=self.ints[:num_rows, KEY],
            temperature=floats[:, TEMPERATURE],
            top_p=floats[:, TOP_P],
            min_p=floats[:, MIN_P],
            top_k=self.ints[:num_rows, TOP_K],
            any_greedy=any_greedy,
            any_filtered=any_filtered,
        )

    def feed(self, num_rows: int) -> torch.Tensor:
        """The next input of each row, shape (rows, 1), which from now on the row may look at."""
        index = self.positions(num_rows).unsqueeze(1)
        self.mask[:num_rows].scatter_(1, index, 0.0)
        return self.tokens[:num_rows].gather(1, index)

    def advance(
        self, drawn: torch.Tensor, logprobs: torch.Tensor, *, any_stops: bool, any_feeding: bool
    ) -> torch.Tensor:
        """Stores what each row drew and returns which rows are done.

        Rows that are still being fed what they already know keep it: `any_feeding` says that there may be some.
        """
        num_rows = drawn.shape[0]
        ints = self.ints[:num_rows]
        position = ints[:, POSITION]
        after = position.unsqueeze(1) + 1
        tokens, stored = self.tokens[:num_rows], self.logprobs[:num_rows]
        sampled = None
        if any_feeding:
            sampled = position + 1 >= ints[:, KNOWN]
            drawn = torch.where(sampled, drawn, tokens.gather(1, after).squeeze(1))
            logprobs = torch.where(sampled, logprobs, stored.gather(1, after).squeeze(1))
        tokens.scatter_(1, after, drawn.unsqueeze(1))
        stored.scatter_(1, after, logprobs.unsqueeze(1))
        position += ints[:, ALIVE]
        done = position + 1 >= ints[:, LIMIT]
        if any_stops:
            stopped = (self.stops[:num_rows] == drawn.unsqueeze(1)).any(1)
            done |= stopped if sampled is None else stopped & sampled
        return done

    def index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _show(self, rows: torch.Tensor, num_tokens: Sequence[int]) -> None:
        """Lets rows look at exactly their first tokens; each step then adds the one that it feeds."""
        hidden = torch.arange(self.mask.shape[1], device=self.device) >= self.index(num_tokens).unsqueeze(1)
        shown = torch.zeros(hidden.shape, dtype=self.mask.dtype, device=self.device)
        self.mask[rows] = shown.masked_fill_(hidden, -torch.inf)
