"""Other architectures: the whole loop on some, and on more of them trainer and engine beside transformers' own code."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import offbeat
from benchmarks.architectures.compare import engine, judge, trainer
from benchmarks.architectures.tiny import tiny_model
from offbeat.config.schema import Config
from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.protocol import Request
from offbeat.errors import UserError
from offbeat.launch.engine_parts import OwnEngine
from offbeat.launch.model_parts import make_embedded, make_policy
from offbeat.launch.wiring import load_tokens
from offbeat.model.loading import TINY_FOLDER
from offbeat.trajectory import Sampling

PACKED, ROWS = ("packed", "slots"), ("rows", "anew")
WAYS = {
    "mistral": PACKED,  # a window
    "phimoe": PACKED,  # experts with a noisy router, and a window that only the mask has
    "deepseek_v3": PACKED,  # heads whose values are smaller than their keys
    "lfm2": ROWS,  # a convolution
}
MORE_WAYS = {
    "gemma2": PACKED,  # scores are capped
    "gpt_oss": PACKED,  # attention may look nowhere
    "nemotron": ("rows", "slots"),  # attention is not told what a call was given for it
    "bloom": ROWS,  # attention that cannot be replaced
    "llama4_text": ROWS,  # attention in chunks
    "doge": ROWS,  # a mask made from values
    "recurrent_gemma": ROWS,  # a state
    "deepseek_v32": ROWS,  # attention to tokens that an indexer picks
}


@pytest.mark.parametrize(
    "name, ways", [*WAYS.items(), *(pytest.param(*one, marks=pytest.mark.full) for one in MORE_WAYS.items())]
)
def test_trainer_and_engine_agree_with_the_models_own_code(name, ways):
    def make():
        return tiny_model(name)

    verdicts = [judge(lambda: trainer(make)), judge(lambda: engine(make))]
    assert [verdict.status for verdict in verdicts] == ["agrees", "agrees"], verdicts
    assert tuple(verdict.way for verdict in verdicts) == ways


def test_a_model_of_which_neither_is_true_is_refused_by_both_in_one_line():
    def make():
        return tiny_model("roberta")

    for part in (trainer, engine):
        verdict = judge(lambda part=part: part(make))
        assert verdict.status == "refused"
        assert verdict.why.startswith("model.path: RobertaForCausalLM (roberta): ")


def saved(name, folder, **changes):
    """A tiny model in a folder, with a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER)
    tiny_model(name, vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def refused_folder(tmp_path):
    """A model whose positions do not begin at 0."""
    return saved("roberta", tmp_path / "model")


@pytest.mark.parametrize("engine", ["embedded", "vllm", "sglang"])
def test_a_trainer_refuses_a_model_whatever_engine_it_is_to_have(engine, refused_folder):
    config = Config.model_validate({"model": {"path": str(refused_folder)}, "rollout": {"engine": engine}})
    with pytest.raises(
        UserError, match=r"RobertaForCausalLM \(roberta\): in a micro-batch with others, a sample's log-probs"
    ):
        make_policy(config)


def test_an_evaluation_refuses_a_model_that_its_engine_would_get_wrong(refused_folder):
    config = Config.model_validate(
        {"model": {"path": str(refused_folder)}, "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 8}}
    )
    with pytest.raises(UserError, match=r"RobertaForCausalLM \(roberta\): the embedded engine's log-probs"):
        make_embedded(config, "eval", version=0)


def test_a_run_beyond_the_length_where_positions_are_coded_anew_is_refused(tmp_path):
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limits = {"max_position_embeddings": 512, "original_max_position_embeddings": 64, "rope_scaling": rope}
    folder = saved("phi3", tmp_path / "model", **limits)
    rollout = {"max_prompt_tokens": 60, "max_new_tokens": 8, "engine": "vllm"}
    config = Config.model_validate({"model": {"path": str(folder)}, "rollout": rollout})
    with pytest.raises(UserError, match=r"= 60 \+ 8: .* has a window of 64 tokens \(longrope"):
        load_tokens(config)


def test_a_worker_tells_that_its_model_generates_slowly_and_why(tmp_path, capsys):
    folder, rollout = saved("lfm2", tmp_path / "model"), {"max_prompt_tokens": 16, "max_new_tokens": 8}
    engines = OwnEngine(Config.model_validate({"model": {"path": str(folder)}, "rollout": rollout}), "w")
    asyncio.run(engines.close())
    told = "worker w: engine: the model has layers beside attention that mix tokens, so every step recomputes all"
    assert told in capsys.readouterr().out


def make_model(kind: str):
    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER)
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    if kind == "qwen2":
        return tokenizer, Qwen2ForCausalLM(Qwen2Config(**common, num_key_value_heads=1, tie_word_embeddings=True))
    if kind == "llama":
        return tokenizer, LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=2, tie_word_embeddings=False))
    if kind == "lfm2":
        special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        return tokenizer, tiny_model("lfm2", vocab_size=len(tokenizer), max_position_embeddings=128, **special)
    return tokenizer, GPTNeoXForCausalLM(GPTNeoXConfig(**common, rotary_pct=0.25))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "lfm2"])
def test_any_architecture_trains_and_its_greedy_tokens_equal_generate(kind, tmp_path):
    tokenizer, model = make_model(kind)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    run = offbeat.train(
        {
            "run": {"dir": str(tmp_path / "runs"), "name": "two", "steps": 2, "threads": 1},
            "model": {"path": str(tmp_path / "model"), "device": "cpu"},
            "batch": {"groups_per_step": 2, "group_size": 4},
            "rollout": {"max_new_tokens": 8, "slots": 8},
            "optimizer": {"lr": 1e-2},
            "eval": {"every": 0},
            "log": {"console": "quiet"},
        },
        reward=even_share,
    )
    assert run.summary["steps"] == 2
    assert run.summary["trajectories"]["trained"] == 16

    from offbeat.tools.export import export_run

    export_run(tmp_path / "runs" / "two", tmp_path / "exported")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    changed = any(not torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
    assert changed, "two steps of training left every weight as it was"
    check_greedy(trained, tokenizer)


def check_greedy(model, tokenizer) -> None:
    prompts = [np.array(tokenizer(text)["input_ids"], np.int32) for text in ("12+7=", "9*3=", "1+2+3=")]
    wanted = []
    for prompt in prompts:
        output = model.generate(torch.as_tensor(prompt)[None].long(), max_new_tokens=12, do_sample=False)
        wanted.append(output[0, len(prompt) :].tolist())

    async def generate():
        engine = EmbeddedEngine(model, num_slots=4, max_context_tokens=64, version=0)
        sampling = Sampling(max_new_tokens=12, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
        requests = [Request(id=str(i), tokens=p, seed=i, sampling=sampling) for i, p in enumerate(prompts)]
        try:
            return await asyncio.gather(*map(engine.generate, requests))
        finally:
            await engine.close()

    got = [generation.segments[0].tokens.tolist() for generation in asyncio.run(generate())]
    assert got == wanted


def even_share(response: str) -> float:
    """Something that random answers differ in: the share of even characters."""
    return sum(ord(c) % 2 == 0 for c in response) / max(len(response), 1)
