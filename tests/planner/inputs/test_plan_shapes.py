import json

import pytest

from offbeat.errors import UserError
from offbeat.planner.inputs import model_shapes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def active_parameters(shape) -> int:
    """Parameters that one token uses as model cards count them, with embedding and norms."""
    total, body = model_shapes.num_parameters(shape), model_shapes.body_parameters(shape)
    return total - body + model_shapes.active_body_parameters(shape)


@pytest.mark.parametrize(
    "name, billions, kv_bytes",
    [
        ("Qwen/Qwen2.5-1.5B", 1.544, 28_672),
        ("Qwen2.5-7B-Instruct", 7.616, 57_344),
        ("qwen2.5-14b", 14.770, 196_608),
        ("qwen2.5-32b", 32.764, 262_144),
        ("Qwen3-4B", 4.022, 147_456),
        ("qwen3-8b", 8.191, 147_456),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.777, 28_672),
        ("qwen2.5-0.5b", 0.494, 12_288),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.030, 131_072),
        ("llama-3.1-70b", 70.554, 327_680),
        ("Qwen3-30B-A3B", 30.532, 98_304),
        ("mixtral-8x7b", 46.703, 131_072),
    ],
)
def test_known_models_have_their_published_size(name, billions, kv_bytes):
    shape = model_shapes.known_model(name)
    assert model_shapes.num_parameters(shape) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert model_shapes.weight_bytes(shape) == 2 * model_shapes.num_parameters(shape)
    assert model_shapes.kv_bytes_per_token(shape) == kv_bytes


def test_experts_are_stored_but_only_some_are_met():
    shape = model_shapes.known_model("qwen3-30b-a3b")
    assert active_parameters(shape) / 1e9 == pytest.approx(3.35, rel=0.01)
    head = shape.vocab * shape.hidden
    assert model_shapes.active_matmul_parameters(shape) == model_shapes.active_body_parameters(shape) + head
    per_expert = 3 * shape.hidden * shape.ffn
    unmet = model_shapes.matmul_parameters(shape) - model_shapes.active_matmul_parameters(shape)
    assert unmet == 48 * 120 * per_expert


def test_a_tied_head_is_multiplied_with_but_stored_once():
    tied, untied = model_shapes.known_model("qwen2.5-1.5b"), model_shapes.known_model("r1-distill-qwen-1.5b")
    assert model_shapes.matmul_parameters(tied) == model_shapes.matmul_parameters(untied)
    assert model_shapes.num_parameters(untied) - model_shapes.num_parameters(tied) == 151_936 * 1536


def test_a_dense_model_meets_all_of_itself():
    shape = model_shapes.known_model("llama-3.1-8b")
    assert active_parameters(shape) == model_shapes.num_parameters(shape)
    assert model_shapes.active_matmul_parameters(shape) == model_shapes.matmul_parameters(shape)


@pytest.mark.parametrize("config, name", [(LLAMA, "llama-3.1-8b"), (QWEN3_MOE, "qwen3-30b-a3b")])
def test_a_config_tells_the_same_as_the_table(tmp_path, config, name):
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, known = model_shapes.read_config(tmp_path), model_shapes.known_model(name)
    assert model_shapes.num_parameters(read) == model_shapes.num_parameters(known)
    assert model_shapes.kv_bytes_per_token(read) == model_shapes.kv_bytes_per_token(known)
    assert read.experts_per_token == known.experts_per_token


def test_experts_of_the_whole_width_are_read():
    mixtral = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    shape = model_shapes.from_config(mixtral)
    assert model_shapes.num_parameters(shape) / 1e9 == pytest.approx(46.703, rel=1e-3)


def test_first_dense_layers_and_shared_experts_are_counted():
    """DeepSeek-MoE 16B: 28 layers of 64 experts (6 met, 2 shared), the first one dense."""
    config = {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 28,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "vocab_size": 102400,
        "tie_word_embeddings": False,
    }
    shape = model_shapes.from_config(config)
    assert (shape.dense_layers, shape.dense_ffn, shape.num_shared_experts) == (1, 10944, 2)
    assert model_shapes.num_parameters(shape) / 1e9 == pytest.approx(16.375, rel=1e-3)
    assert active_parameters(shape) / 1e9 == pytest.approx(2.83, rel=0.01)


def test_heads_follow_from_the_width_unless_they_are_told():
    assert model_shapes.from_config(LLAMA).head_dim == 128
    assert model_shapes.from_config({**LLAMA, "head_dim": 256}).head_dim == 256
    assert model_shapes.from_config({**LLAMA, "head_dim": None}).head_dim == 128
    gemma = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"} | {"model_type": "gemma2"}
    assert model_shapes.from_config(gemma).is_tied
    assert model_shapes.from_config({"text_config": LLAMA}).hidden == 4096


@pytest.mark.parametrize(
    "change, said",
    [
        ({"hidden_size": None}, "hidden_size is missing; give a decoder's config.json"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'; it must be a whole number, 1 or more"),
        ({"is_encoder_decoder": True}, "is not a decoder"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not a decoder"),
        ({"kv_lora_rank": 512}, "latent attention is not supported yet"),
        ({"num_attention_heads": 33}, "num_attention_heads = 33 does not divide hidden_size = 4096"),
        ({"num_experts": 8, "mlp_only_layers": [3]}, "only the first layers may be without experts"),
    ],
)
def test_a_bad_config_is_one_line(change, said):
    with pytest.raises(UserError) as caught:
        model_shapes.from_config({**LLAMA, **change}, "m/config.json")
    assert str(caught.value).startswith("m/config.json: ")
    assert said in str(caught.value)


def test_an_unknown_name_or_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"unknown model; did you mean 'qwen3-8b'\? known are qwen2.5-0.5b, .*mixtral"):
        model_shapes.known_model("Qwen3-9B")
    with pytest.raises(UserError, match="cannot be read"):
        model_shapes.read_config(tmp_path / "none.json")
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(UserError, match="is not valid JSON"):
        model_shapes.read_config(tmp_path)
