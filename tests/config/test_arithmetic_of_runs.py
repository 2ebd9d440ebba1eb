from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config import from_dict, load, summarise
from offbeat.config.summary import microbatches_per_update, num_checkpoints, num_evaluations


def test_a_run_adds_up():
    lines = "\n".join(summarise(load(None, ["--run.steps=300"]), num_parameters=200_000))
    assert "32 groups × 8 = 256 samples, one update" in lines
    assert "300 steps = 9,600 groups = 76,800 samples" in lines
    assert "checkpoints 7.2 MB" in lines  # two kept and one being written, 12 bytes a parameter


def test_answers_that_are_claimed_by_themselves_are_dealt_by_themselves():
    lines = "\n".join(summarise(load(None, ["--batch.gate=release", "--batch.updates-per-step=4"])))
    assert "32 groups × 8 = 256 samples, each claimed by itself, 4 updates of 64 samples" in lines


def test_evaluations_and_checkpoints_are_counted_with_the_first_and_the_last():
    config = load(None, ["--run.steps=50", "--eval.every=20", "--checkpoint.every=20"])
    assert (num_evaluations(config), num_checkpoints(config)) == (4, 3)  # 0, 20, 40, 50 and 20, 40, 50
    never = load(None, ["--eval.every=0", "--checkpoint.every=0"])
    assert (num_evaluations(never), num_checkpoints(never)) == (0, 1)
    assert "checkpoints  1, at the end; the newest 1 kept" in summarise(never)


def test_an_evaluation_has_no_more_prompts_than_are_held_out():
    config = load(None, ["--eval.samples=2"])
    lines = {number: summarise(config, num_held_out=number)[6] for number in (None, 200, 11, 0)}
    assert lines[None] == lines[200]
    assert lines[200].endswith("200 prompts × 2 = 400 answers each")
    assert lines[11].endswith("11 prompts × 2 = 22 answers each (all that are held out; eval.prompts = 200)")
    assert lines[0] == "evaluation   none: no task has a held-out split"


@settings(max_examples=50, deadline=None)
@given(
    groups=st.integers(1, 9),
    group_size=st.integers(2, 9),
    prompt=st.integers(1, 20),
    new=st.integers(1, 20),
    room=st.integers(0, 200),
    gate=st.sampled_from(["strict", "release"]),
)
def test_packing_never_needs_more_micro_batches_than_promised(groups, group_size, prompt, new, room, gate):
    limit = prompt + new + room
    config = from_dict(
        {
            "batch": {
                "groups_per_step": groups,
                "group_size": group_size,
                "gate": gate,
                "tokens_per_microbatch": limit,
            },
            "rollout": {"max_prompt_tokens": prompt, "max_new_tokens": new},
        }
    )
    packed = _plan_by_hand(groups, group_size, prompt, new, limit)
    assert packed <= microbatches_per_update(config)
    if gate == "release":  # each may be the answer to another prompt
        assert _plan_by_hand(groups * group_size, 1, prompt, new, limit) <= microbatches_per_update(config)


def _plan_by_hand(groups: int, group_size: int, prompt: int, new: int, tokens_per_microbatch: int) -> int:
    """Packs full-length samples one by one, a group's prompt once per micro-batch."""
    count, room, last = 0, 0, None
    for group in range(groups):
        for _ in range(group_size):
            cost = new - 1 if last == group else prompt + new - 1
            if count == 0 or cost > room:
                count, room, cost = count + 1, tokens_per_microbatch, prompt + new - 1
            room, last = room - cost, group
    return count


def test_what_the_name_of_a_loss_stands_for_is_told():
    def told(*given: str) -> str:
        return next(
            line for line in summarise(load(None, ["--rollout.engine=embedded", *given])) if line.startswith("learning")
        )

    assert "grpo: advantage group, clip 0.2 below and 0.2 above, sequence_mean, correction off" in told()
    dapo = told("--loss.name=dapo", "--schedule.mode=overlap", "--loss.clip-low=0.1")
    assert "clip 0.1 below and 0.28 above, token_mean, correction tis up to 2, groups without signal" in dapo
    assert "correction icepop from 0.5 to 5" in told("--loss.correction=icepop")
    assert "ratios up to 3" in told("--loss.name=cispo", "--loss.ratio-max=3")
