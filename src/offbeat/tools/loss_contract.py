"""Checks a user's loss or advantage on made-up data for the properties that training relies on.

A loss is tried as training uses it. First `clean` sets all numbers of untrained tokens to 0; then the loss of each
trained token is multiplied by a weight and summed. The checks look at the losses and at the gradient of that sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import UserError
from offbeat.locate import one_line
from offbeat.trainer.losses import LossSettings, TokenLoss, Tokens, clean

PARAMETERS = {"loss": {"tokens", "settings"}, "advantage": {"rewards", "groups"}}
LENGTHS = (5, 1, 7, 3, 4, 6)
"""Number of tokens in each made-up sequence; the second sequence has no trained token."""
CLOSE = 1e-4
"""Tolerance, relative to the largest value: above rounding errors of float32, below a real effect."""
FAR = (20.0, 100.0)
"""Differences between log-probs to try: the bound to which `Tokens` clamps log-ratios, and a number whose exponential
overflows float32."""
GROUPS = np.array([7, 3, 7, 11, 3, 7, 5, 11, 3, 7])
REWARDS = np.array([1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 0.7, -0.5, 0.3, 0.1])
EQUAL = (0.0, 0.1, 1 / 3, 1e6 + 0.1)
"""Rewards to try, each given to all answers; rounding may make their mean differ from the reward."""


class Mark(StrEnum):
    HOLDS = "holds"
    WARNS = "warns"
    """The property does not hold, but that may be intended."""
    FAILS = "fails"


@dataclass(frozen=True)
class ContractFinding:
    check: str
    mark: Mark
    detail: str = ""


class ContractBroken(Exception):
    """A loss or advantage lacks a property; the message says how and why it matters."""


def kind_of(function: Callable[..., Any], spec: str) -> str:
    """Returns "loss" or "advantage", by the names of the function's parameters. `spec` names the function in errors."""
    names = set(inspect.signature(function).parameters)
    found = [kind for kind, wanted in PARAMETERS.items() if names & wanted]
    if len(found) != 1:
        raise UserError(
            f"{spec}: takes {', '.join(sorted(names)) or 'nothing'}; a loss takes tokens and settings, an advantage "
            "rewards and groups; rename its parameters, or add --kind loss or --kind advantage"
        )
    return found[0]


def _run(*checks: tuple[str, Mark, Callable[[], None]]) -> list[ContractFinding]:
    """Runs checks and returns their findings; stops if the first check fails. A check consists of a description, the
    mark to report if the property does not hold, and the function to call."""
    findings: list[ContractFinding] = []
    for sentence, mark, check in checks:
        try:
            check()
            findings.append(ContractFinding(sentence, Mark.HOLDS))
            continue
        except ContractBroken as error:
            findings.append(ContractFinding(sentence, mark, str(error)))
        except Exception as error:  # noqa: BLE001  # a user's function may raise anything
            findings.append(ContractFinding(sentence, Mark.FAILS, one_line(error)))
        if len(findings) == 1:
            break
    return findings


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ContractBroken(otherwise)


def check_loss(loss: Callable[..., Any], settings: LossSettings | None = None) -> list[ContractFinding]:
    trial = _LossTrial(loss, settings or LossSettings())
    return _run(
        ("returns one finite number per token", Mark.FAILS, trial.returns_numbers),
        ("its gradient reaches the log-probs and is finite", Mark.FAILS, trial.has_gradient),
        ("sequences have no influence on each other", Mark.FAILS, trial.is_by_sequence),
        ("tokens that are not trained on have no influence", Mark.FAILS, trial.ignores_masked),
        ("far log-ratios and large advantages stay finite", Mark.FAILS, trial.takes_extremes),
        ("its gradient is proportional to the advantages", Mark.WARNS, trial.scales),
        ("fresh tokens of better answers become likelier, of worse ones less likely", Mark.WARNS, trial.points_right),
    )


class _LossTrial:
    def __init__(self, loss: Callable[..., Any], settings: LossSettings):
        self.loss, self.settings, self.tokens = loss, settings, _made_up()
        self.weights = 0.5 + torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(1))
        self.whole = (torch.zeros(0), torch.zeros(0))

    def returns_numbers(self) -> None:
        self.whole = self._cost(self.tokens, self.weights)

    def has_gradient(self) -> None:
        is_finite, is_there = self.whole[1].isfinite().all(), self.whole[1].any()
        _require(is_finite, "the gradient is NaN or infinite, as after a root or logarithm at 0, even inside where()")
        _require(is_there, "the gradient is 0 at every token: compute the loss from tokens.logprobs, without detach()")

    def is_by_sequence(self) -> None:
        why = (
            "the result would depend on the split into micro-batches (batch.tokens_per_microbatch); average with "
            "tokens.means or loss.aggregate instead"
        )
        for chosen in ([0], [1], [2], [4, 0, 5, 2, 1, 3], [2, 4]):
            at = torch.cat([(self.tokens.sequence == i).nonzero()[:, 0] for i in chosen])
            numbers = torch.tensor([chosen.index(int(i)) for i in self.tokens.sequence[at]])
            part = replace(_taken(self.tokens, at), sequence=numbers, num_sequences=len(chosen))
            self._compare(part, at, f"with sequences {chosen} alone", why)

    def ignores_masked(self) -> None:
        mask = self.tokens.mask
        why = "tools or too old versions produced the untrained tokens; multiply by tokens.mask before adding up"
        older = replace(self.tokens, staleness=torch.where(mask, self.tokens.staleness, 10**6))
        self._compare(older, torch.arange(len(mask)), "with another staleness of untrained tokens", why)
        self._compare(_taken(self.tokens, mask.nonzero()[:, 0]), mask.nonzero()[:, 0], "without untrained tokens", why)
        for tokens in (replace(self.tokens, mask=torch.zeros_like(mask)), _taken(self.tokens, torch.arange(0))):
            gradient = self._cost(tokens, torch.ones(len(tokens.mask)))[1]
            _require(not gradient.any(), f"the gradient is not 0 with untrained tokens alone: {why}")

    def takes_extremes(self) -> None:
        turn = torch.arange(sum(LENGTHS))
        for far in FAR:
            low, high = torch.tensor(-1.0 - far), torch.tensor(-1.0)
            tokens = replace(
                self.tokens,
                logprobs=torch.where(turn % 2 == 0, low, high),
                proximal=torch.where(turn % 2 == 0, high, low),
                behaviour=torch.where(turn % 4 < 2, high, low),
                advantages=torch.where(turn % 3 == 0, 100.0, -100.0),
            )
            where = f"at log-probs {far:g} apart; tokens.log_ratio and tokens.log_importance are bounded"
            gradient = self._cost(tokens, self.weights, where)[1]
            _require(gradient.isfinite().all(), f"the gradient is NaN or infinite {where}")

    def scales(self) -> None:
        own = self.whole[1]
        for factor in (0.0, 3.0):
            found = self._cost(replace(self.tokens, advantages=factor * self.tokens.advantages), self.weights)[1]
            is_close = (found - factor * own).abs().max() <= CLOSE * max(factor, 1.0) * own.abs().max()
            _require(is_close, f"the gradient is not {factor:g} times as large with {factor:g} times the advantages")

    def points_right(self) -> None:
        fresh = replace(self.tokens, proximal=self.tokens.logprobs, behaviour=self.tokens.logprobs)
        wrong = (self._cost(fresh, self.weights)[1] * self.tokens.advantages >= 0)[self.tokens.mask]
        _require(
            not wrong.any(), f"the loss moves {int(wrong.sum())} of {len(wrong)} tokens the wrong way; check its sign"
        )

    def _cost(self, tokens: Tokens, weights: Tensor, where: str = "") -> tuple[Tensor, Tensor]:
        """Returns the loss of each trained token, with 0 for other tokens, and the gradient of their weighted sum."""
        leaf = tokens.logprobs.clone().requires_grad_()
        found = self.loss(clean(replace(tokens, logprobs=leaf))[0], self.settings)
        values, clipped = (found.loss, found.clipped) if isinstance(found, TokenLoss) else (found, leaf)
        kind = getattr(values, "dtype", type(values).__name__)
        _require(
            isinstance(values, Tensor) and values.is_floating_point(), f"it returned {kind}; return a float tensor"
        )
        for name, tensor in (("loss", values), ("clipped", clipped)):
            why = f"it returned {name} of shape {tuple(tensor.shape)} for {len(leaf)} tokens; return one per token"
            _require(tensor.shape == leaf.shape, why)
        is_finite = values.detach().isfinite().all()
        _require(is_finite, f"some of the {len(leaf)} losses are NaN or infinite {where}".rstrip())
        total = (values * weights * tokens.mask).sum()
        gradient = torch.autograd.grad(total, leaf, allow_unused=True)[0] if total.requires_grad else None
        return torch.where(tokens.mask, values.detach(), 0.0), torch.zeros_like(leaf) if gradient is None else gradient

    def _compare(self, tokens: Tokens, at: Tensor, where: str, why: str) -> None:
        """Raises `ContractBroken` if a loss or gradient of `tokens` differs from that in the whole made-up batch, in
        which the tokens have the indices `at`. `where` and `why` complete the message."""
        for name, new, whole in zip(
            ("value", "gradient"), self._cost(tokens, self.weights[at]), self.whole, strict=True
        ):
            apart = (new - whole[at]).abs().nan_to_num(torch.inf)
            worst = int(apart.argmax())
            text = f"a {name} is {float(new[worst]):.4g} {where} and {float(whole[at][worst]):.4g} otherwise: {why}"
            _require(apart[worst] <= CLOSE * whole.abs().max(), text)


def _made_up() -> Tokens:
    """Returns the same made-up tokens each time, sampled by slightly older policies."""
    random, count = torch.Generator().manual_seed(0), sum(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    logprobs = -0.2 - 3 * torch.rand(count, generator=random)
    proximal = (logprobs + 0.08 * torch.randn(count, generator=random)).clamp(max=-1e-3)
    return Tokens(
        logprobs=logprobs,
        proximal=proximal,
        behaviour=(proximal + 0.08 * torch.randn(count, generator=random)).clamp(max=-1e-3),
        advantages=torch.tensor([1.3, 0.7, -0.9, 0.4, -1.6, 0.8])[sequence],
        mask=(torch.rand(count, generator=random) < 0.8) & (sequence != 1),
        sequence=sequence,
        num_sequences=len(LENGTHS),
        staleness=torch.randint(0, 4, (count,), generator=random),
        reference=proximal - 0.1,
    )


def _taken(tokens: Tokens, at: Tensor) -> Tokens:
    values: dict[str, Any] = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    taken: dict[str, Any] = {name: one[at] if isinstance(one, Tensor) else one for name, one in values.items()}
    return Tokens(**taken)


def check_advantage(advantage: Callable[[np.ndarray, np.ndarray], Any]) -> list[ContractFinding]:
    def call(rewards: np.ndarray, groups: np.ndarray, where: str = "") -> np.ndarray:
        found = np.asarray(advantage(rewards.copy(), groups.copy()))
        is_right = np.issubdtype(found.dtype, np.number) and found.shape == rewards.shape
        _require(is_right, f"it returned {found.dtype} of shape {found.shape}; return one number per answer")
        num_wrong = int((~np.isfinite(found)).sum())
        _require(not num_wrong, f"{num_wrong} of {len(found)} advantages are NaN or infinite{where}")
        return found.astype(np.float64)

    def compare(found: np.ndarray, wanted: np.ndarray, why: str) -> None:
        at = int(np.abs(found - wanted).argmax())
        text = f"an advantage changes from {wanted[at]:.4g} to {found[at]:.4g} {why}"
        _require(abs(found[at] - wanted[at]) <= CLOSE, text)

    def returns_numbers() -> None:
        call(REWARDS, GROUPS)
        call(REWARDS[:1], GROUPS[:1], " for a group of one")
        for scale in (1e6, 1e-12):
            call(REWARDS * scale, GROUPS, f" with rewards around {scale:g}")
        call(1e6 + 1e-9 * np.arange(len(REWARDS)), GROUPS, " with rewards that hardly differ")

    def ignores_order() -> None:
        order, names = np.random.default_rng(0).permutation(len(REWARDS)), {7: 900_001, 3: 12, 11: 0, 5: 44}
        renamed = np.array([names[group] for group in GROUPS])[order]
        why = "after a change of order and group ids; answers come in any order, and ids are labels"
        compare(call(REWARDS[order], renamed), call(REWARDS, GROUPS)[order], why)

    def is_by_group() -> None:
        for own in (group == GROUPS for group in np.unique(GROUPS)):
            why = "when its group is alone; the function uses the whole batch, so batch.groups_per_step matters"
            compare(call(REWARDS[own], GROUPS[own]), call(REWARDS, GROUPS)[own], why)

    def needs_differences() -> None:
        for value in EQUAL:
            largest = np.abs(call(np.full(len(GROUPS), value), GROUPS)).max()
            why = "subtract a mean, and do not divide rounding errors by each other"
            _require(largest <= CLOSE, f"advantages of up to {largest:.4g} where all rewards are {value:g}: {why}")

    def keeps_order() -> None:
        for own in (group == GROUPS for group in np.unique(GROUPS)):
            found = call(REWARDS, GROUPS)[own][np.argsort(REWARDS[own])]
            text = f"rewards {np.sort(REWARDS[own])} give the advantages {found.round(3)}; check their sign"
            _require(not np.any(np.diff(found) < -CLOSE), text)

    return _run(
        ("returns one finite number per answer", Mark.FAILS, returns_numbers),
        ("the order of answers and the names of groups do not matter", Mark.FAILS, ignores_order),
        ("groups have no influence on each other", Mark.WARNS, is_by_group),
        ("where all rewards are equal there is no advantage", Mark.FAILS, needs_differences),
        ("within a group, a better answer never has a lower advantage", Mark.WARNS, keeps_order),
    )


CHECKS: dict[str, Callable[..., list[ContractFinding]]] = {"loss": check_loss, "advantage": check_advantage}
