"""Partial rollouts around a bare vLLM engine: nothing of Offbeat but `offbeat.rules`, which needs numpy alone.

    PYTHONPATH=src python examples/partial_vllm.py MODEL [STEPS]

Each step wants `P` groups of `N` answers. More are begun than wanted; when `P` groups are whole the rest is aborted and
carried on with the next weights: its tokens are at most `S` steps old when they are trained. `S` + 1 times as many are
begun, unless rounds with none to spare turn out to be as fast. `train` stands for your trainer.
"""

import sys
import time

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.platforms import current_platform

from offbeat.rules.groups import Candidate, VersionRun, select
from offbeat.rules.over_provision import OverProvision

P, N, S, MAX_TOKENS = 4, 4, 2, 160
PROMPT = list(b"23*24=")  # as tokens; here one and the same for all groups
factor = OverProvision(S)


class Answer:
    def __init__(self, group: int, member: int):
        self.group, self.member, self.ended = group, member, False
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.steps: list[int] = []

    def params(self) -> SamplingParams:  # a seed for every continuation: noise must not repeat
        seed = hash((self.group, self.member, len(self.tokens))) & 0x7FFFFFFF
        return SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS - len(self.tokens), logprobs=0, seed=seed)


def train(batch: list[list[Answer]], step: int, engine: LLMEngine) -> None:
    """Your update: tokens, log-probs of the weights that sampled them, and the step of each token's weights."""
    engine.reset_prefix_cache()  # no key or value of older weights is used again


def play(engine: LLMEngine, groups: dict[int, list[Answer]], step: int) -> list[int]:
    """Generates until a batch is whole, and returns its groups."""
    alive = {f"{a.group}-{a.member}-{step}": a for group in groups.values() for a in group if not a.ended}
    begun = {key: len(a.tokens) for key, a in alive.items()}
    for key, a in alive.items():
        engine.add_request(key, {"prompt_token_ids": PROMPT + a.tokens}, a.params())
    while not (taken := select(map(candidate, groups.values()), step, P, S, in_order=False).take):
        for out in engine.step():
            a, new = alive[out.request_id], out.outputs[0]
            fresh = slice(len(a.tokens) - begun[out.request_id], None)
            a.logprobs += [p[t].logprob for p, t in zip(new.logprobs[fresh], new.token_ids[fresh], strict=True)]
            a.steps += [step] * len(new.token_ids[fresh])
            a.tokens += new.token_ids[fresh]
            if out.finished:
                a.ended = True
                del alive[out.request_id]
    engine.abort_request(list(alive))
    return list(taken)


def candidate(group: list[Answer]) -> Candidate:
    steps = [step for a in group for step in a.steps]
    stretches = tuple(VersionRun(steps.count(step), step) for step in sorted(set(steps)))
    number = group[0].group
    return Candidate(number, number, all(a.ended for a in group), None, min(steps, default=None), stretches)


def main(model: str, num_steps: int) -> None:
    on_cpu = current_platform.is_cpu()
    args = EngineArgs(model, dtype="float32" if on_cpu else "auto", max_model_len=256, max_num_seqs=64)
    args.enforce_eager = True
    args.enable_chunked_prefill = not on_cpu  # there vLLM ends when it splits the prompt of a request with a seed
    engine = LLMEngine.from_engine_args(args)
    groups: dict[int, list[Answer]] = {}
    num_begun = 0
    for step in range(num_steps):
        start_s, r = time.perf_counter(), factor.factor
        while len(groups) < round(r * P):
            groups[num_begun] = [Answer(num_begun, member) for member in range(N)]
            num_begun += 1
        before = sum(len(a.tokens) for g in groups.values() for a in g)
        taken = play(engine, groups, step)
        generated = sum(len(a.tokens) for g in groups.values() for a in g) - before
        batch = [groups.pop(number) for number in taken]
        train(batch, step, engine)
        factor.outcome(generated, time.perf_counter() - start_s)
        oldest = step - min(s for g in batch for a in g for s in a.steps)
        print(f"step {step}: r = {r:g}, oldest token {oldest}, {len(groups)} go on")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8)
