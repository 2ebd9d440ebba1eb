import importlib.util
import random
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.arithmetic import Arithmetic, is_held_out, worked_answer
from offbeat.model.loading import TINY_FOLDER, context_window, load_model, load_tokenizer, stop_token_ids

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny.py"


@pytest.fixture(scope="module")
def make_tiny():
    spec = importlib.util.spec_from_file_location("make_tiny", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("offbeat-tiny")


@pytest.fixture(scope="module")
def model():
    return load_model("offbeat-tiny", torch.float32, torch.device("cpu"))


def test_the_shipped_folder_is_small():
    assert sum(file.stat().st_size for file in TINY_FOLDER.iterdir()) <= 4_000_000


def test_the_shipped_model_is_a_llama_with_grouped_queries(model):
    assert model.config.model_type == "llama"
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert context_window(model.config) == 512
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.2e6


def test_the_shipped_files_are_what_the_script_makes(make_tiny, tokenizer, model):
    text = "".join(map(chr, range(256)))
    assert make_tiny.make_tokenizer().encode(text) == tokenizer.encode(text)
    made = make_tiny.make_model().config.to_dict()
    shipped = model.config.to_dict()
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size", "rope_parameters"):
        assert made[key] == shipped[key]


def test_stop_and_padding_are_tokens_of_their_own(tokenizer):
    assert stop_token_ids("offbeat-tiny", tokenizer) == (257,)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 257)


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<")))  # a special token's name is that token
def test_any_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_token_is_a_byte(tokenizer):
    assert tokenizer.encode("7*4=1:7 2:14 , .\n") == list(b"7*4=1:7 2:14 , .\n")


def test_it_starts_out_right_about_a_third_of_the_time(make_tiny, model, tokenizer):
    torch.manual_seed(0)
    problems = Arithmetic(level=2).held_out(200)
    assert 0.2 <= make_tiny.mean_reward(model, tokenizer, problems, max_new_tokens=24) <= 0.5


def test_its_answers_are_well_formed_and_end(make_tiny, model, tokenizer):
    torch.manual_seed(0)
    answers = make_tiny.sample(model, tokenizer, Arithmetic(level=2).held_out(200), max_new_tokens=24)
    assert sum(re.fullmatch(r"\d{1,3}( \d{1,3})?", answer) is not None for answer in answers) >= 190


def test_pretraining_never_sees_a_held_out_problem(make_tiny, tokenizer):
    prompts = [str(problem.prompt) for problem in islice(make_tiny.problems(seed=0), 5000)]
    assert not any(map(is_held_out, prompts))
    assert max(int(prompt.rstrip("=").split("*")[1]) for prompt in prompts if "*" in prompt) == 40
    for tokens, labels in islice(make_tiny.batches(tokenizer, seed=0, slips=True), 5):
        for row, answer in zip(tokens.tolist(), labels.tolist(), strict=True):
            prompt = tokenizer.decode([token for token, label in zip(row, answer, strict=True) if label == -100])
            assert not is_held_out(prompt.replace("<pad>", ""))


def test_pretraining_answers_are_right_without_slips_and_well_formed_with_them(make_tiny):
    rng = random.Random(0)
    for problem in islice(make_tiny.problems(seed=1), 300):
        prompt = str(problem.prompt)
        right = worked_answer(prompt)
        assert make_tiny.answer_with_slips(prompt, rng, slips=False) == right
        slipped = make_tiny.answer_with_slips(prompt, rng, slips=True)
        assert len(slipped.split()) == len(right.split())
