"""The contract of a policy loss.

Data are made up, the same each time, and reach the loss as training hands them over: cleaned, with every number 0 where
a token is not trained on. What counts is what training computes: the sum of the trained tokens' losses, each times a
weight of its own, and the gradient of that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from offbeat.learn.contract import Broke, Check, Finding, Mark, run_checks
from offbeat.learn.losses import LossSettings, TokenLoss
from offbeat.learn.tokens import Tokens, clean

LENGTHS = (5, 1, 7, 3, 4, 6)
"""Of the sequences; nothing of the second is trained on."""
CLOSE = 1e-4
"""Of the largest value: what rounding in float32 may do, and less than any effect that is one."""
FAR = (20.0, 100.0)
"""Distances of log-probs: as far as `Tokens` bounds them, and farther than float32 can exponentiate."""
LARGE = 100.0
"""Advantages of a reward that nobody scaled."""
NUDGE, NUDGED_CLOSE = 1e-2, 2e-2
"""Finite differences in float32: how far to go, and what of the largest slope their error may be."""

Loss = Callable[[Tokens, LossSettings], Any]


@dataclass(frozen=True)
class Cost:
    """What a loss makes of tokens."""

    values: Tensor
    """Of the trained tokens; 0 elsewhere."""
    gradient: Tensor
    """Of the weighted sum, for each log-prob."""
    total: Tensor


def check_loss(loss: Loss, settings: LossSettings | None = None) -> Iterator[Finding]:
    return run_checks(_Trial(loss, settings or LossSettings()).checks())


class _Trial:
    def __init__(self, loss: Loss, settings: LossSettings):
        self.loss, self.settings = loss, settings
        self.tokens = made_up(LENGTHS)
        self.weights = 0.5 + torch.rand(len(self.tokens.mask), generator=_random(1))
        self.whole = Cost(*[torch.zeros(0)] * 3)
        """Of all tokens, once the first check has held."""

    def checks(self) -> list[Check]:
        return [
            ("returns one finite number per token", self.returns_numbers),
            ("its gradient reaches the log-probs, nothing else, and is finite", self.has_gradient),
            ("the same input gives the same result", self.repeats),
            ("leaves its input as it was", self.changes_nothing),
            ("sequences have no influence on each other", self.is_by_sequence),
            ("the order of sequences does not matter", self.ignores_order),
            ("tokens that are not trained on have no influence", self.ignores_masked),
            ("without a token to train on it comes to 0", self.takes_nothing),
            ("far log-ratios and large advantages stay finite", self.takes_extremes),
            ("without advantages there is no gradient", self.needs_advantages),
            ("fresh tokens of better answers become likelier, of worse ones less likely", self.points_right),
            ("its gradient, beside that of finite differences", self.equals_differences),
        ]

    def returns_numbers(self) -> str | None:
        note = None
        try:
            self._call(self.tokens)
        except (TypeError, AttributeError):
            self.tokens = replace(self.tokens, reference=self.tokens.proximal - 0.1)
            self._call(self.tokens)  # what it raises now has another cause
            note = "needs tokens.reference, which is there where loss.kl_coef is over 0"
        self.whole = self._cost(self.tokens, self.weights)
        if note is not None:
            raise Broke(note, Mark.WARNS)
        return None

    def has_gradient(self) -> str | None:
        leaf = self.tokens.logprobs.clone().requires_grad_()
        found = self._call(replace(self.tokens, logprobs=leaf))
        if found.grad_fn is None:
            raise Broke("there is none: compute it from tokens.logprobs, without detach() or no_grad()")
        others = [shape for variable, shape in _leaves(found) if variable is not leaf]
        if others:
            raise Broke(f"it also reaches a tensor of shape {others[0]}, which no optimizer updates: detach it")
        if not self.whole.gradient.isfinite().all():
            raise Broke("it is NaN or infinite: a root or logarithm at 0, or a where() around one, would do that")
        if not self.whole.gradient.any():
            raise Broke("it is 0 at every token, so nothing would be learnt")
        return None

    def repeats(self) -> None:
        again = self._cost(self.tokens, self.weights)
        if not (torch.equal(again.values, self.whole.values) and torch.equal(again.gradient, self.whole.gradient)):
            raise Broke("a second call gave another: a run could not be repeated or resumed as it was")

    def changes_nothing(self) -> None:
        given = clean(self.tokens)[0]
        before = copy.deepcopy(given)
        self.loss(given, self.settings)
        for field in fields(given):
            old, new = getattr(before, field.name), getattr(given, field.name)
            if isinstance(old, Tensor) and not torch.equal(old, new):
                raise Broke(f"tokens.{field.name} was changed in place; corrections and figures still need it")

    def is_by_sequence(self) -> None:
        count = len(LENGTHS)
        for chosen in [[i] for i in range(count)] + [[0, 1, 2], [3, 4, 5], [2, 4]]:
            told = f"sequence {chosen[0]} alone" if len(chosen) == 1 else f"sequences {chosen} by themselves"
            self._compare_with_whole(
                chosen,
                told,
                "what is divided by or compared with something of its micro-batch changes with "
                "batch.tokens_per_microbatch; use tokens.means, and leave denominators to loss.aggregate",
            )

    def ignores_order(self) -> None:
        self._compare_with_whole([4, 0, 5, 2, 1, 3], "in another order", "tokens.sequence is a label, not a number")

    def ignores_masked(self) -> None:
        mask = self.tokens.mask

        def spoil(numbers: Tensor) -> Tensor:
            return torch.where(mask, numbers, torch.full_like(numbers, torch.nan))

        spoilt = replace(
            self.tokens,
            logprobs=spoil(self.tokens.logprobs),
            proximal=spoil(self.tokens.proximal),
            behaviour=spoil(self.tokens.behaviour),
            advantages=spoil(self.tokens.advantages),
            staleness=torch.where(mask, self.tokens.staleness, 10**6),
        )
        why = "those come from tools, or from versions that are too old; multiply by tokens.mask before adding up"
        self._compare(self._cost(spoilt, self.weights), self.whole, "with something else there", why)
        kept = self.tokens.mask.nonzero()[:, 0]
        gone = self._cost(_taken(self.tokens, kept, len(LENGTHS)), self.weights[kept])
        self._compare(gone, _at(self.whole, kept), "without them", why)

    def takes_nothing(self) -> None:
        for tokens, told in (
            (replace(self.tokens, mask=torch.zeros_like(self.tokens.mask)), "none of them is trained on"),
            (_taken(self.tokens, torch.arange(0), 1), "there is none at all, as in an empty answer"),
        ):
            found = self._cost(tokens, torch.ones(len(tokens.mask)), f" where {told}")
            if float(found.total) != 0 or found.gradient.any() or not found.gradient.isfinite().all():
                raise Broke(f"where {told}: {float(found.total):.4g}, or a gradient other than 0")

    def takes_extremes(self) -> None:
        for far in FAR:
            count = len(self.tokens.mask)
            turn = torch.arange(count)
            low, high = torch.full((count,), -1.0 - far), torch.full((count,), -1.0)
            tokens = replace(
                self.tokens,
                logprobs=torch.where(turn % 2 == 0, low, high),
                proximal=torch.where(turn % 2 == 0, high, low),
                behaviour=torch.where(turn % 4 < 2, high, low),
                advantages=torch.where(turn % 3 == 0, LARGE, -LARGE),
                reference=None if self.tokens.reference is None else low,
            )
            hint = "; tokens.log_ratio and tokens.log_importance are bounded, differences of your own are not"
            told = f" at log-probs {far:g} apart{hint}"
            if not self._cost(tokens, torch.ones(count), told).gradient.isfinite().all():
                raise Broke(f"the gradient is NaN or infinite{told}")

    def needs_advantages(self) -> None:
        silent = replace(self.tokens, advantages=torch.zeros_like(self.tokens.advantages))
        if self._cost(silent, self.weights).gradient.abs().max() > CLOSE * self.whole.gradient.abs().max():
            raise Broke("there is one, as of a regulariser; answers that were no better pull all the same", Mark.WARNS)

    def points_right(self) -> None:
        fresh = replace(self.tokens, proximal=self.tokens.logprobs, behaviour=self.tokens.logprobs)
        found = self._cost(fresh, self.weights).gradient
        trained = self.tokens.mask & (self.tokens.advantages != 0)
        wrong = int((found * self.tokens.advantages >= 0)[trained].sum())
        if wrong:
            raise Broke(f"not so at {wrong} of {int(trained.sum())} tokens; is its sign right?", Mark.WARNS)

    def equals_differences(self) -> str:
        places = self.tokens.mask.nonzero()[:, 0].tolist()
        slopes = torch.zeros_like(self.whole.gradient)
        for i in places:
            ends = []
            for way in (NUDGE, -NUDGE):
                moved = self.tokens.logprobs.clone()
                moved[i] += way
                ends.append(self._cost(replace(self.tokens, logprobs=moved), self.weights).total.double())
            slopes[i] = (ends[0] - ends[1]) / (2 * NUDGE)
        limit = NUDGED_CLOSE * max(float(slopes.abs().max()), float(self.whole.gradient.abs().max()))
        apart = int(((slopes - self.whole.gradient).abs() > limit).sum())
        if apart:
            return f"another at {apart} of {len(places)} tokens: it has a stop-gradient, as CISPO does, or kinks"
        return "the same at every token: it has no stop-gradient"

    def _call(self, tokens: Tokens, told: str = "") -> Tensor:
        """What the loss returns, as one value per token."""
        given = clean(tokens)[0]
        found = self.loss(given, self.settings)
        values = found.loss if isinstance(found, TokenLoss) else found
        if not isinstance(values, Tensor):
            raise Broke(f"returned a {type(values).__name__}; a tensor, or a TokenLoss, is wanted")
        for tensor in (values, found.clipped if isinstance(found, TokenLoss) else values):
            if tensor.shape != given.mask.shape:
                shape, wanted = tuple(tensor.shape), tuple(given.mask.shape)
                raise Broke(f"returned shape {shape} for {wanted[0]} tokens; adding up is left to loss.aggregate")
        if not values.is_floating_point():
            raise Broke(f"returned {str(values.dtype).removeprefix('torch.')}; a float is wanted")
        if values.device != given.mask.device:
            raise Broke(f"returned a tensor on {values.device}; the tokens are on {given.mask.device}")
        if not values.detach().isfinite().all():
            count = int((~values.detach().isfinite()).sum())
            raise Broke(f"{count} of {len(values)} are NaN or infinite{told}")
        return values

    def _cost(self, tokens: Tokens, weights: Tensor, told: str = "") -> Cost:
        leaf = tokens.logprobs.detach().clone().requires_grad_()
        values = self._call(replace(tokens, logprobs=leaf), told)
        total = (values * weights * tokens.mask).sum()
        found = torch.autograd.grad(total, leaf, allow_unused=True)[0] if total.requires_grad else None
        gradient = torch.zeros_like(leaf) if found is None else found
        return Cost(torch.where(tokens.mask, values.detach(), 0.0), gradient, total.detach())

    def _compare_with_whole(self, chosen: Sequence[int], told: str, why: str) -> None:
        places = torch.cat([(self.tokens.sequence == i).nonzero()[:, 0] for i in chosen])
        part = _taken(self.tokens, places, len(chosen), chosen)
        self._compare(self._cost(part, self.weights[places]), _at(self.whole, places), told, why)

    def _compare(self, found: Cost, wanted: Cost, told: str, why: str) -> None:
        """All tokens' largest value is the measure, whichever are compared: a part may have none but zeros."""
        for name in ("values", "gradient"):
            new, old, scale = (getattr(cost, name) for cost in (found, wanted, self.whole))
            apart = (new - old).abs()
            if not bool((apart <= CLOSE * scale.abs().max()).all()):
                at = int(apart.nan_to_num(torch.inf).argmax())
                what = "a value" if name == "values" else "a gradient"
                raise Broke(f"{what} is {float(new[at]):.4g} {told} and {float(old[at]):.4g} otherwise: {why}")


def made_up(lengths: Sequence[int]) -> Tokens:
    """Tokens of a policy that has moved a little, and was sampled from earlier ones."""
    random, count = _random(0), sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    logprobs = -0.2 - 3 * torch.rand(count, generator=random)
    proximal = (logprobs + 0.08 * torch.randn(count, generator=random)).clamp(max=-1e-3)
    behaviour = (proximal + 0.08 * torch.randn(count, generator=random)).clamp(max=-1e-3)
    mask = (torch.rand(count, generator=random) < 0.8) & (sequence != 1)
    by_sequence = torch.tensor([1.3, 0.7, -0.9, 0.4, -1.6, 0.8])[: len(lengths)]
    return Tokens(
        logprobs=logprobs,
        proximal=proximal,
        behaviour=behaviour,
        advantages=by_sequence[sequence],
        mask=mask,
        sequence=sequence,
        num_sequences=len(lengths),
        staleness=torch.randint(0, 4, (count,), generator=random),
    )


def _taken(tokens: Tokens, places: Tensor, num_sequences: int, chosen: Sequence[int] | None = None) -> Tokens:
    """Some of the tokens, in the order of their places; `chosen` numbers their sequences anew."""
    names = ("logprobs", "proximal", "behaviour", "advantages", "mask", "sequence", "staleness")
    taken = {name: getattr(tokens, name)[places] for name in names}
    if chosen is not None:
        new = torch.zeros(tokens.num_sequences, dtype=torch.int64)
        new[list(chosen)] = torch.arange(len(chosen))
        taken["sequence"] = new[taken["sequence"]]
    reference = None if tokens.reference is None else tokens.reference[places]
    return Tokens(**taken, num_sequences=num_sequences, reference=reference)


def _at(cost: Cost, places: Tensor) -> Cost:
    return Cost(cost.values[places], cost.gradient[places], cost.total)


def _leaves(values: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The tensors that a gradient ends in."""
    seen, ahead = set(), [values.grad_fn]
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable, tuple(node.variable.shape)
        ahead.extend(inner for inner, _ in node.next_functions)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
