import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
)

from offbeat.errors import OffbeatError, UserError
from offbeat.model.loading import (
    context_window,
    load_model,
    load_state,
    load_tokenizer,
    resolve,
    save_hf,
    state_tensors,
    stop_token_ids,
)

CPU = torch.device("cpu")
SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2, attention_dropout=0.3),
    "tied llama": LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "tied qwen2": Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt-neox": GPTNeoXConfig(**SMALL, hidden_dropout=0.4, attention_dropout=0.4),
    "tied gpt-neox": GPTNeoXConfig(**SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4),
}


def random_model(name: str, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_hf(random_model("tied llama"), load_tokenizer("offbeat-tiny"), path)
    return path


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_folder_is_one_line():
    with pytest.raises(UserError) as error:
        resolve("/nowhere/at-all")
    assert "no such folder" in one_line(error)


def test_an_unknown_hub_id_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as error:
        resolve("offbeat-rl/no-such-model")
    assert "no such folder, and" in one_line(error)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_model_in_the_hubs_cache_is_found_without_a_network(monkeypatch, tmp_path, need_weights):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--small"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    if need_weights:
        (snapshot / "model.safetensors").write_bytes(b"")
    assert resolve("someone/small", need_weights=need_weights) == snapshot


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is a file"):
        resolve(tmp_path / "model.safetensors")


def test_folder_without_config_says_so(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        resolve(tmp_path)


def test_folder_without_safetensors_says_so(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        load_model(folder, torch.float32, CPU)


def test_damaged_weights_are_one_line(folder):
    (folder / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(UserError) as error:
        load_model(folder, torch.float32, CPU)
    assert str(folder) in one_line(error)


def test_unknown_architecture_is_one_line(folder):
    (folder / "config.json").write_text('{"model_type": "perpetual-motion"}')
    with pytest.raises(UserError) as error:
        load_model(folder, torch.float32, CPU)
    assert "perpetual-motion" in one_line(error)


def test_a_missing_tensor_is_refused_instead_of_made_up(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, torch.float32, CPU)


def test_missing_tokenizer_says_so(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(folder)


def test_damaged_tokenizer_is_one_line(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError) as error:
        load_tokenizer(folder)
    assert "tokenizer" in one_line(error)


def test_chat_template_comes_from_a_file(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer("offbeat-tiny", template)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user]hi"


def test_chat_template_errors_name_file_and_line(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_tokenizer("offbeat-tiny", tmp_path / "absent.jinja")
    (tmp_path / "bad.jinja").write_text("fine\n{% for m in %}")
    with pytest.raises(UserError, match=r"bad\.jinja', line 2"):
        load_tokenizer("offbeat-tiny", tmp_path / "bad.jinja")


def test_stop_tokens_are_the_union_of_all_that_name_one(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 9}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert set(stop_token_ids(folder, tokenizer)) == {5, 7, 9, tokenizer.eos_token_id}


def test_a_model_without_any_stop_token_is_refused(folder):
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="eos_token_id"):
        stop_token_ids(folder, tokenizer)


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_model_loads_with_the_same_logits_and_without_dropout(name, tmp_path):
    model = random_model(name)
    save_hf(model, load_tokenizer("offbeat-tiny"), tmp_path / "out", {"NOTES.md": "made by a test\n"})
    again = load_model(tmp_path / "out", torch.float32, CPU)
    tokens = torch.arange(12)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert torch.equal(again.train()(tokens).logits, model(tokens).logits)
    assert (tmp_path / "out" / "NOTES.md").read_text() == "made by a test\n"
    assert again(tokens).past_key_values is None
    assert AutoConfig.from_pretrained(tmp_path / "out").use_cache is True


def test_saving_never_writes_over_a_folder_and_leaves_no_draft(folder):
    with pytest.raises(UserError, match="already exists"):
        save_hf(random_model("llama"), load_tokenizer("offbeat-tiny"), folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        save_hf(random_model("llama"), load_tokenizer("offbeat-tiny"), tmp_path / "out", {"absent/file": b""})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", CONFIGS)
def test_state_round_trip_makes_another_model_the_same(name):
    model, other = random_model(name, seed=0), random_model(name, seed=1)
    load_state(other, {key: tensor.clone() for key, tensor in state_tensors(model).items()})
    tokens = torch.arange(12)[None]
    assert torch.equal(other(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_state_holds_each_tensor_once_in_an_order_that_stays(name):
    model = random_model(name)
    state = state_tensors(model)
    assert sum(t.numel() for t in state.values()) == sum(p.numel() for p in model.parameters())
    assert list(state) == list(state_tensors(random_model(name, seed=1)))


@pytest.mark.parametrize("name", ["llama", "tied llama", "tied qwen2"])
def test_state_names_are_those_of_the_saved_file(name, tmp_path):
    model = random_model(name)
    model.save_pretrained(tmp_path)
    assert set(state_tensors(model)) == set(load_file(tmp_path / "model.safetensors"))


def test_state_may_come_under_a_tied_name():
    model, other = random_model("tied llama", seed=0), random_model("tied llama", seed=1)
    tensors = state_tensors(model)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    load_state(other, tensors)
    assert torch.equal(other.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_state_that_does_not_fit_is_named_and_changes_nothing():
    model = random_model("llama")
    before = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    wrong = {name: tensor + 1 for name, tensor in before.items()}
    wrong["extra"] = wrong.pop("model.norm.weight")
    with pytest.raises(OffbeatError, match=r"lack model\.norm\.weight and hold unknown extra"):
        load_state(model, wrong)
    with pytest.raises(OffbeatError, match=rf"lack [^,]+, [^,]+, [^,]+ and {len(before) - 3} more"):
        load_state(model, {})
    with pytest.raises(OffbeatError, match=r"model\.norm\.weight has shape \(3,\)"):
        load_state(model, {**before, "model.norm.weight": torch.ones(3)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_tensors(model).items())


def test_context_window_is_read_whatever_its_name():
    assert context_window(LlamaConfig(max_position_embeddings=77)) == 77
    assert context_window(GPT2Config(n_positions=66)) == 66


def test_the_window_ends_where_positions_are_coded_by_the_longest_row():
    assert context_window(long_rope()) == 32
    assert context_window(Phi3Config(max_position_embeddings=128)) == 128


def long_rope() -> Phi3Config:
    """As Phi-3's with 128k tokens."""
    rope = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    return Phi3Config(max_position_embeddings=128, original_max_position_embeddings=32, rope_scaling=rope)


def test_loading_module_itself_needs_no_torch():
    code = "import sys, offbeat.model.loading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
