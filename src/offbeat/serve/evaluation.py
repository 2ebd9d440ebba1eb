"""Figures of an evaluation round, from the rewards of its groups."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.ledger.records import EvalGroup, EvalRound, GroupState


def eval_figures(finished: EvalRound) -> dict[str, float]:
    """mean@k and pass@k over the held-out prompts, in all and, where there are several, by source.

    pass@k is the mean over prompts of the best of k rewards, which for rewards of 0 and 1 is the usual one. Members
    whose reward failed are left out; prompts without a scored member are counted apart.
    """
    judged = [group for group in finished.groups if group.state is GroupState.EVALUATED and group.rewards]
    figures: dict[str, float] = {"eval_step": finished.step, "eval_prompts": len(judged)}
    if not judged:
        return figures
    figures.update(_means("eval", judged))
    sources = sorted({group.source for group in judged})
    if len(sources) > 1:
        for source in sources:
            figures.update(_means(f"eval/{source}", [group for group in judged if group.source == source]))
    return figures


def _means(prefix: str, groups: Sequence[EvalGroup]) -> dict[str, float]:
    k = max(group.size for group in groups)
    return {
        f"{prefix}_mean@{k}": sum(sum(group.rewards) / len(group.rewards) for group in groups) / len(groups),
        f"{prefix}_pass@{k}": sum(max(group.rewards) for group in groups) / len(groups),
    }
