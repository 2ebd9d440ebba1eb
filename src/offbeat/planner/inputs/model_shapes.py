"""Reads the shape of a model from a Hugging Face config.json or by a known name, and counts its parameters.

Counts leave out biases and the norms of queries and keys, which are less than a ten-thousandth of a model.
Sliding-window attention counts as full attention, so the cost of long contexts is overestimated for such models.
"""

from __future__ import annotations

import functools
import json
import pathlib
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from offbeat.errors import UserError
from offbeat.planner.inputs.workload import ModelShape
from offbeat.spelling import nearest

HEAD_DIM = 128
ANY_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
NOT_A_DECODER = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def num_parameters(shape: ModelShape) -> int:
    """Number of all parameters; an LM head that shares its weights with the embedding is not counted again."""
    norms = shape.hidden * (2 * shape.num_layers + 1)
    return body_parameters(shape) + norms + _table(shape) * (1 if shape.is_tied else 2)


def body_parameters(shape: ModelShape) -> int:
    """Matmul parameters of all layers: attention, feed-forward, experts, routers."""
    return _layers(shape, shape.num_experts + shape.num_shared_experts)


def active_body_parameters(shape: ModelShape) -> int:
    """Matmul parameters of all layers, with only as many experts per layer as one token uses."""
    return _layers(shape, shape.experts_per_token + shape.num_shared_experts)


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters used in matmuls: all layers and the head, but not the input embedding, which is a lookup."""
    return body_parameters(shape) + _table(shape)


def active_matmul_parameters(shape: ModelShape) -> int:
    """Parameters used in matmuls for one token; the FLOP per token follow from this number."""
    return active_body_parameters(shape) + _table(shape)


def weight_bytes(shape: ModelShape) -> int:
    return num_parameters(shape) * shape.bytes_per_weight


def kv_bytes_per_token(shape: ModelShape) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.bytes_per_kv


def _table(shape: ModelShape) -> int:
    return shape.vocab * shape.hidden


def _layers(shape: ModelShape, num_experts: int) -> int:
    """Matmul parameters of all layers, with `num_experts` experts in each layer that has experts."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    if not shape.num_experts:
        return shape.num_layers * (attention + 3 * shape.hidden * shape.ffn)
    sparse = 3 * shape.hidden * shape.ffn * num_experts + shape.hidden * shape.num_experts
    dense = 3 * shape.hidden * shape.dense_ffn
    return shape.num_layers * attention + (shape.num_layers - shape.dense_layers) * sparse + shape.dense_layers * dense


def known_model(name: str) -> ModelShape:
    """Shape of a public model by name; an owner before a slash and endings such as -Instruct are ignored."""
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("deepseek-").removeprefix("meta-")
    tables = _known()
    found = max((one for one in tables if plain == one or plain.startswith(f"{one}-")), key=len, default=None)
    if found is None:
        near = f"did you mean {close!r}? " if (close := nearest(plain, tables)) else ""
        known = f"known are {', '.join(tables)}"
        raise UserError(f"{name!r}: unknown model; {near}{known}; for another, give the path of its config.json")
    return ModelShape(name=name, **{"head_dim": HEAD_DIM, **tables[found]})


@functools.cache
def _known() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("offbeat.planner.inputs").joinpath("models.toml").read_text("utf-8"))


def read_config(path: pathlib.Path | str) -> ModelShape:
    """Reads the shape from a config.json, or from a folder that holds one."""
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; give a model's config.json") from error
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON; give a model's config.json") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a model's config.json: it holds no JSON object")
    return from_config(config, str(file))


def from_config(config: Mapping[str, Any], file: str = "config.json") -> ModelShape:
    """Shape described by a Hugging Face configuration; `file` names the configuration in errors."""
    inner = config.get("text_config", config)  # multimodal models nest the decoder's configuration
    architectures = config.get("architectures") or [""]
    if inner.get("is_encoder_decoder") or any(str(architectures[0]).endswith(word) for word in NOT_A_DECODER):
        kind = architectures[0] or "an encoder-decoder"
        raise UserError(f"{file}: {kind} is not a decoder; only decoders are supported")
    if inner.get("kv_lora_rank"):
        raise UserError(f"{file}: kv_lora_rank = {inner['kv_lora_rank']}: latent attention is not supported yet")
    hidden, num_heads = _whole(inner, "hidden_size", file), _whole(inner, "num_attention_heads", file)
    if not inner.get("head_dim") and hidden % num_heads:
        why = f"head_dim is missing, and num_attention_heads = {num_heads} does not divide hidden_size = {hidden}"
        raise UserError(f"{file}: {why}; add head_dim")
    return ModelShape(
        name=str(config.get("_name_or_path") or pathlib.Path(file).parent.name or inner.get("model_type", "model")),
        num_layers=_whole(inner, "num_hidden_layers", file),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=int(inner.get("num_key_value_heads") or num_heads),
        head_dim=int(inner.get("head_dim") or hidden // num_heads),
        vocab=_whole(inner, "vocab_size", file),
        is_tied=bool(inner.get("tie_word_embeddings", str(inner.get("model_type", "")).startswith("gemma"))),
        **_feed_forward(inner, file),
    )


def _feed_forward(config: Mapping[str, Any], file: str) -> dict[str, int]:
    dense = _whole(config, "intermediate_size", file)
    key = next((key for key in ANY_EXPERTS if config.get(key)), None)
    if key is None:
        return {"ffn": dense}
    ffn = int(config.get("moe_intermediate_size") or dense)
    if (config.get("decoder_sparse_step") or 1) != 1 or (config.get("moe_layer_freq") or 1) != 1:
        why = "experts in some layers only (decoder_sparse_step, moe_layer_freq) are not supported yet"
        raise UserError(f"{file}: {why}")
    alone = list(config.get("mlp_only_layers") or range(config.get("first_k_dense_replace") or 0))
    if alone != list(range(len(alone))):
        raise UserError(f"{file}: mlp_only_layers = {alone}: only the first layers may be without experts")
    shared_width = config.get("shared_expert_intermediate_size") or ffn * (config.get("n_shared_experts") or 0)
    if shared_width % ffn:
        raise UserError(
            f"{file}: shared_expert_intermediate_size = {shared_width} is not a multiple of moe_intermediate_size = "
            f"{ffn}; shared experts of another width than the others are not supported yet"
        )
    return {
        "ffn": ffn,
        "num_experts": int(config[key]),
        "experts_per_token": _whole(config, "num_experts_per_tok", file),
        "num_shared_experts": shared_width // ffn,
        "dense_layers": len(alone),
        "dense_ffn": dense if alone else 0,
    }


def _whole(config: Mapping[str, Any], key: str, file: str) -> int:
    value = config.get(key)
    if value is None:
        raise UserError(f"{file}: {key} is missing; give a decoder's config.json")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{file}: {key} is {value!r}; it must be a whole number, 1 or more")
    return value
