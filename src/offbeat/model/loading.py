"""Loads a model and its tokenizer by name or folder, reads their limits, and saves a model to a folder.

Works with any Hugging Face causal language model that has safetensors weights. A user's mistake (missing folder,
weights or tokenizer, damaged file) raises a `UserError` of one line. torch is imported only where needed, so that a
process can tokenise without it.

A loaded model has all its weights, is in evaluation mode and has no dropout. So its forward pass depends only on
weights and tokens, and the log-probs of two engines can be compared. A saved folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import OffbeatError, UserError
from offbeat.files import fsync_file, replace_folder
from offbeat.spelling import nearest

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TINY = "offbeat-tiny"
TINY_FOLDER = Path(__file__).parent / "tiny"
TINY_TOOLS = "offbeat-tiny-tools"
OWN_MODELS = {TINY: TINY_FOLDER, TINY_TOOLS: Path(__file__).parent / "tiny_tools"}
"""The models that ship with Offbeat, and their folders."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
HUB_TIMEOUT_S = 10.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
WINDOW_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
KINDS = f"the folder of a Hugging Face model, its name on the hub such as Qwen/Qwen2.5-0.5B-Instruct, or {TINY!r}"
NO_WINDOW_TOKENS = 1 << 20
"""Context window of architectures that have no limit, such as state-space models."""
_loading = threading.Lock()
"""Lock to hold while transformers loads a model, because loading changes the process's initialisers and default
dtype."""


def resolve(path: str | Path, *, need_weights: bool = True) -> Path:
    """Returns the model's folder. `path` is `offbeat-tiny` (included in the package), a folder, or a Hugging Face id,
    which is downloaded if needed. With `need_weights`, the folder must have a config.json and weights."""
    if (own := OWN_MODELS.get(str(path))) is not None:
        return own
    folder = Path(path).expanduser()
    if is_hub_name(path):
        folder = _from_hub(str(path), need_weights)
    if not folder.exists():
        beside = [file.parent.name for file in folder.parent.glob("*/config.json")]
        near = nearest(folder.name, [*OWN_MODELS, *beside] if Path(path).name == str(path) else beside)
        raise UserError(
            f"model.path = {str(path)!r}: no such folder; "
            + (f"did you mean {str(Path(path).with_name(near))!r}?" if near else f"give {KINDS}")
        )
    if not folder.is_dir():
        raise UserError(f"model.path = {str(path)!r} is a file; give the folder that holds config.json and the weights")
    if need_weights and not (folder / "config.json").is_file():
        raise UserError(f"model.path = {str(path)!r} has no config.json; give the folder of a Hugging Face model")
    if need_weights and not _has_weights(folder):
        raise UserError(
            f"model.path = {str(path)!r} has no *.safetensors; save the model with save_pretrained() of transformers"
        )
    return folder


def is_hub_name(path: str | Path) -> bool:
    """Whether `path` is taken as a name on the Hugging Face hub: it has the form owner/name and is no local folder."""
    return HUB_ID.fullmatch(str(path)) is not None and not Path(path).expanduser().exists()


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Loads a model and turns its dropout off; refuses a model with missing weights. The model keeps no KV cache unless
    a call passes `use_cache=True`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from offbeat.model.devices import spare

    folder = resolve(path)
    logging.disable_progress_bar()  # the bar would garble the run's console
    with _loading, _one_line(f"model.path = {str(path)!r}: transformers cannot load the model"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _turn_dropout_off(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    model, report = loaded
    if report["missing_keys"]:
        raise UserError(
            f"model.path = {str(path)!r}: the weights lack {_some(report['missing_keys'])}; save the whole model again"
        )
    model.config.use_cache = False
    return spare(model.to(device).eval())


def load_without_weights(path: str | Path, dtype: torch.dtype) -> PreTrainedModel | None:
    """Returns the model as `load_model` does, but with parameters that take no memory (torch's `meta` device), which
    `stored_weights` can fill; buffers are there. None if the weights must be loaded as a whole, because transformers
    converts them while it loads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from offbeat.model.devices import spare

    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a tied one is registered twice
            empty = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = empty

    with _loading, _one_line(f"model.path = {str(path)!r}: transformers cannot load the model"):
        config = AutoConfig.from_pretrained(resolve(path), trust_remote_code=False)
        _turn_dropout_off(config)
        torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        finally:
            torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    model.config.use_cache = False
    stored = stored_weights(path)
    if any(not any(name in stored for name in names) for names, _ in _tied_names(model)):
        return None
    return spare(model.eval())


def stored_weights(path: str | Path) -> dict[str, Path]:
    """Returns the file of each tensor in a model's folder, by the tensor's name."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for file in sorted(resolve(path).glob("*.safetensors")):
        with _one_line(str(file)), safe_open(file, framework="pt") as stored:
            found.update(dict.fromkeys(stored.keys(), file))
    return found


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Returns the names of each of the model's tensors; a tied tensor has several."""
    return [names for names, _ in _tied_names(model)]


def load_shape(path: str | Path) -> PreTrainedModel:
    """Returns the model without memory for its weights (torch's `meta` device), to inspect its layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with _loading, _one_line(f"model.path = {str(path)!r}: transformers cannot load the model"), torch.device("meta"):
        config = AutoConfig.from_pretrained(resolve(path), trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def load_tokenizer(path: str | Path, template: str | Path | None = None) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer; `template` is a file with a chat template that replaces the tokenizer's own."""
    from transformers import AutoTokenizer

    folder = resolve(path, need_weights=False)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"model.path = {str(path)!r} has no tokenizer (tokenizer.json); copy the model's tokenizer files there, "
            "or name a folder that has them as model.tokenizer"
        )
    with _one_line(f"model.path = {str(path)!r}: transformers cannot load its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if template is not None:
        _set_chat_template(tokenizer, Path(template).expanduser())
    return tokenizer


def context_window(config: PretrainedConfig) -> int:
    """Returns the largest number of tokens, prompt and answer together, that the model takes.

    A longrope model codes the positions of all rows differently as soon as any row of the batch exceeds a certain
    length. That length is then the limit, so that a row never depends on the rows beside it.
    """
    text = config.get_text_config()
    values = [getattr(text, key, None) for key in WINDOW_KEYS]
    window = next((value for value in values if isinstance(value, int) and value > 0), NO_WINDOW_TOKENS)
    return min([window, *switching_lengths(text)])


def switching_lengths(config: PretrainedConfig) -> list[int]:
    """Returns the numbers of tokens above which longrope codes positions differently: one number for each longrope
    setting in `config`, so an empty list without longrope."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict) and one.get("rope_type") == "longrope"]
    shorter = getattr(config, "original_max_position_embeddings", None)
    lengths = [one.get("original_max_position_embeddings", shorter) for one in kinds]
    return [length for length in lengths if length is not None]


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns all tokens that end an answer according to generation_config.json, the tokenizer or config.json."""
    folder = resolve(path, need_weights=False)
    config = _read_json(folder / "config.json")
    named = [
        _read_json(folder / "generation_config.json").get("eos_token_id"),
        tokenizer.eos_token_id,
        config.get("eos_token_id"),
        (config.get("text_config") or {}).get("eos_token_id"),
    ]
    ids = [token for value in named for token in (value if isinstance(value, list) else [value]) if token is not None]
    if not ids:
        raise UserError(
            f"model.path = {str(path)!r} names no stop token; set eos_token_id in its generation_config.json"
        )
    return tuple(sorted(set(ids)))


def save_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    extra_files: Mapping[str, str | bytes] | None = None,
) -> None:
    """Writes a folder that transformers, vLLM and SGLang can load: weights in the model's dtype, tokenizer,
    `extra_files`.

    A `folder` that is not empty is refused.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists; name a new folder or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".{folder.name}.{os.getpid()}.draft"
    draft.mkdir()
    try:
        use_cache, model.config.use_cache = model.config.use_cache, True  # it is off only while Offbeat runs the model
        try:
            model.save_pretrained(draft)
        finally:
            model.config.use_cache = use_cache
        tokenizer.save_pretrained(draft)
        _name_tokenizer_for_all(draft / "tokenizer_config.json")
        for name, content in (extra_files or {}).items():
            (draft / name).write_bytes(content.encode() if isinstance(content, str) else content)
        for file in draft.iterdir():
            shutil.copymode(draft / "config.json", file)  # safetensors makes files readable by their owner alone
            fsync_file(file)
        if folder.exists():
            folder.rmdir()  # it is empty, see above
        replace_folder(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def state_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the model's own tensors (no copies) by name, in the model's order; tied tensors appear under one name."""
    return {names[0]: tensor.detach() for names, tensor in _tied_names(model)}


def load_state(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors, by name, into the model and casts them to its dtype; a tied tensor may have any of its names.

    All names and shapes are checked before the first tensor is written.
    """
    import torch

    pairs, known, missing = [], set(), []
    for names, own in _tied_names(model):
        known.update(names)
        given = [name for name in names if name in tensors]
        if not given:
            missing.append(names[0])
        elif tensors[given[0]].shape != own.shape:
            shape = tuple(tensors[given[0]].shape)
            raise OffbeatError(f"tensor {given[0]} has shape {shape}, but the model's has {tuple(own.shape)}")
        else:
            pairs.append((own, tensors[given[0]]))
    unexpected = [name for name in tensors if name not in known]
    if missing or unexpected:
        wrong = [f"lack {_some(missing)}"] * bool(missing) + [f"hold unknown {_some(unexpected)}"] * bool(unexpected)
        raise OffbeatError(f"the given tensors do not fit the model: they {' and '.join(wrong)}")
    with torch.no_grad():
        for own, tensor in pairs:
            own.copy_(tensor)


def _tied_names(model: torch.nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Returns each of the model's tensors once, with all its names. Transformers saves it under the first of them."""
    tied_targets = getattr(model, "all_tied_weights_keys", None) or {}
    names_by_tensor: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # the parameters themselves, for `id`
        names_by_tensor.setdefault(id(tensor), ([], tensor))[0].append(name)
    for names, _ in names_by_tensor.values():
        names.sort(key=lambda name: name in tied_targets)
    return list(names_by_tensor.values())


def _from_hub(hub_id: str, need_weights: bool) -> Path:
    """Returns the model's folder in the local Hugging Face cache, downloading it first if it is not there."""
    from huggingface_hub import snapshot_download

    cached = cached_folder(hub_id)
    if cached is not None and (not need_weights or _has_weights(cached)):
        return cached
    patterns = HUB_PATTERNS if need_weights else [p for p in HUB_PATTERNS if p != "*.safetensors"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT_S))
    except Exception as error:  # the hub's client raises errors of many kinds
        raise _hub_error(hub_id, error) from error


def cached_folder(hub_id: str) -> Path | None:
    """Returns the folder of a hub model in the local cache; None if the model was never downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def hub_parameters(hub_id: str) -> int | None:
    """Returns the number of parameters of a model on the hub, without downloading it; None if the hub does not know
    that number. Raises `UserError` if there is no such model or the hub cannot be reached."""
    from huggingface_hub import HfApi

    try:
        stored = HfApi().model_info(hub_id, timeout=HUB_TIMEOUT_S, expand=["safetensors"]).safetensors
    except Exception as error:  # as above
        raise _hub_error(hub_id, error) from error
    return None if stored is None else stored.total


def _hub_error(hub_id: str, error: Exception) -> UserError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    what = f"model.path = {hub_id!r}: no such folder, and"
    if isinstance(error, GatedRepoError):
        page = f"https://huggingface.co/{hub_id}"
        return UserError(
            f"{what} the Hugging Face hub has a model of this name whose terms must be accepted first; accept them at "
            f"{page} and set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return UserError(
            f"{what} the Hugging Face hub has no such model, or it is private; check the name, or set HF_TOKEN"
        )
    return UserError(
        f"{what} the Hugging Face hub cannot be reached to download it; check the network, or give a local folder, "
        f"such as one that hf download {hub_id} --local-dir FOLDER has made on a machine with a network"
    )


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _turn_dropout_off(config: Any) -> None:
    for key, value in vars(config.get_text_config()).items():
        if ("dropout" in key or "pdrop" in key or key == "layerdrop") and isinstance(value, float):
            setattr(config.get_text_config(), key, 0.0)


def _set_chat_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    import jinja2

    if not file.is_file():
        raise UserError(f"model.chat_template = {str(file)!r}: no such file; give a file with a Jinja chat template")
    tokenizer.chat_template = file.read_text(encoding="utf-8")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"model.chat_template = {str(file)!r}, line {error.lineno}: {error.message}") from error


def _name_tokenizer_for_all(file: Path) -> None:
    """Renames the generic tokenizer class in `file` to its name before transformers 5, because engines expect that."""
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not valid JSON ({error}); copy or download the file again") from error


def _some(names: Any) -> str:
    """Returns the first three names, and the number of the others, as text."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turns errors of transformers and the hub into a `UserError` of one line that begins with `what`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{what}: {reason[:200]}") from error
