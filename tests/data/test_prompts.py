import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from offbeat.data.mixture import WeightedSource
from offbeat.data.prompts import Problem, Renderer
from offbeat.errors import UserError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)
WORDS = ["<s>", "</s>", "<unk>", "hello", "world", "user", "assistant", "system", ":", "brief", "again"]


def tokenizer(template=None, special="<s> $A"):
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(single=special, special_tokens=[("<s>", 0), ("</s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = template
    return made


class Source:
    def __init__(self, chat=None, system=None):
        self.name, self.chat, self.system, self.is_opened = "words", chat, system, False


def words(renderer, prompt, **source):
    tokens = renderer.tokens(Source(**source), Problem(prompt), 3)
    assert tokens.dtype == np.int32
    return " ".join(WORDS[token] for token in tokens)


def refusal(renderer, prompt, **source):
    with pytest.raises(UserError) as caught:
        renderer.tokens(Source(**source), Problem(prompt), 3)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def renderer(template=None, max_prompt_tokens=64, **options):
    special = options.pop("special", "<s> $A")
    return Renderer(tokenizer(template, special), max_prompt_tokens=max_prompt_tokens, **options)


def test_plain_text_gets_what_stands_in_front_and_nothing_behind():
    assert words(renderer(), "hello world") == "<s> hello world"
    assert words(renderer(special="<s> $A </s>"), "hello world") == "<s> hello world"
    assert words(renderer(special="<s> $A </s>"), "hello </s>") == "<s> hello </s>"


def test_a_source_chooses_the_chat_template_or_the_model_does():
    chat = "<s> user : hello assistant :"
    assert words(renderer(TEMPLATE), "hello") == chat
    assert words(renderer(TEMPLATE), "hello", chat=True) == chat
    assert words(renderer(TEMPLATE), "hello", chat=False) == "<s> hello"


def test_a_system_message_stands_in_front_unless_the_problem_brings_one():
    made = renderer(TEMPLATE)
    assert words(made, "hello", system="brief") == "<s> system : brief user : hello assistant :"
    own = [{"role": "system", "content": "again"}, {"role": "user", "content": "hello"}]
    assert words(made, own, system="brief") == "<s> system : again user : hello assistant :"
    assert words(made, own[1:], chat=False) == "<s> user : hello assistant :"


def test_chat_without_a_template_names_the_remedy():
    for prompt, chat in ((([{"role": "user", "content": "hello"}]), None), ("hello", True)):
        assert refusal(renderer(), prompt, chat=chat).startswith("words, problem 3: ")
        assert "set model.chat_template" in refusal(renderer(), prompt, chat=chat)
    assert "task.system of words" in refusal(renderer(), "hello", system="brief")


def test_what_a_template_refuses_is_one_line():
    assert "no tools here" in refusal(renderer(TEMPLATE), [{"role": "tool", "content": "x"}])


def test_a_prompt_that_is_too_long_names_length_limit_and_key():
    text = "hello " * 9
    assert refusal(renderer(max_prompt_tokens=9), text) == (
        "words, problem 3: its prompt has 10 tokens, over rollout.max_prompt_tokens = 9; raise this limit, or set "
        'rollout.long_prompts = "skip" or "cut"'
    )
    assert words(renderer(max_prompt_tokens=10), text)
    assert "over the model's window of 16" in refusal(renderer(window_tokens=16, max_new_tokens=7), text)
    assert words(renderer(window_tokens=17, max_new_tokens=7), text)


def test_the_template_is_told_by_its_hash():
    assert renderer().template_hash is None
    assert renderer(TEMPLATE).template_hash == blake3(TEMPLATE.encode()).hexdigest()
    assert renderer({"default": TEMPLATE, "other": "x"}).template_hash == renderer(TEMPLATE).template_hash


def test_a_member_of_a_mixture_can_be_rendered():
    class Hello:
        name, default_reward, chat = "hello", None, None

    member = WeightedSource(Hello(), "hello-2", system="brief")
    assert len(renderer(TEMPLATE).tokens(member, Problem("hello"), 0)) == 9


def test_rendering_needs_no_torch():
    code = "import sys, offbeat.data.prompts, offbeat.data.mixture; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
