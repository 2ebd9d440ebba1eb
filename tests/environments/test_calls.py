"""Each format is written here as its models write it, and read back."""

import json

import pytest
from chat_tokenizers import chat_tokenizer, odd_splits
from hypothesis import given
from hypothesis import strategies as st

from offbeat.environments.calls import FORMATS, MAX_CALLS, TurnReader, find_format, recognise_format
from offbeat.environments.protocol import CallStatus
from offbeat.errors import UserError

OK = CallStatus.OK


def dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def gemma(value) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else dumps(value)


def qwen_xml(name, arguments):
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name, arguments):
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def invoke(name, arguments):
    values = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
    return f'<function_calls>\n<invoke name="{name}">\n{values}</invoke>\n</function_calls>'


def one_deepseek(name, arguments):
    fenced = f"```json\n{dumps(arguments)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{fenced}<｜tool▁call▁end｜>"


def harmony(name, arguments):
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{head}<|message|>{dumps(arguments)}<|call|>"


WRITERS = {
    "hermes": lambda name, a: f"<tool_call>\n{dumps({'name': name, 'arguments': a})}\n</tool_call>",
    "qwen-xml": qwen_xml,
    "glm": glm,
    "invoke": invoke,
    "llama": lambda name, a: dumps({"name": name, "parameters": a}),
    "mistral": lambda name, a: f"[TOOL_CALLS][{dumps({'name': name, 'arguments': a, 'id': 'abcdefghi'})}]",
    "deepseek": lambda name, a: f"<｜tool▁calls▁begin｜>{one_deepseek(name, a)}<｜tool▁calls▁end｜>",
    "kimi": lambda name, a: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{dumps(a)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "harmony": harmony,
    "pythonic": lambda name, a: (
        f"<|tool_call_start|>[{name}({', '.join(f'{key}={value!r}' for key, value in a.items())})]<|tool_call_end|>"
    ),
    "gemma": lambda name, a: f"<|tool_call>call:{name}{gemma(a)}<tool_call|>",
}
AS_TEXT = {"qwen-xml", "glm", "invoke"}
"""Formats without types: every value is a text."""
ENDS = "<|end|><|eot_id|><|eom_id|>[INST]"
ALL = "\n".join(tag for one in FORMATS.values() for tag in one.tags) + "<think></think>" + ENDS
TOKENIZER = chat_tokenizer(ALL)
LETTERS = chat_tokenizer("", ())
"""A tokenizer that has none of the tags as tokens."""


def ids(text, tokenizer=TOKENIZER):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def read(name, text, tokenizer=TOKENIZER, **how):
    return TurnReader(tokenizer, FORMATS[name], **how).read(ids(text, tokenizer), 7)


def test_every_format_has_its_writer_here():
    assert WRITERS.keys() == FORMATS.keys()


words = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]))
json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


def has_tag(value) -> bool:
    """Whether a text in a value looks like a tag, which formats without quotes cannot hold."""
    return any(mark in dumps(value) for mark in ("<", "[", "｜", "\\r"))


@pytest.mark.parametrize("name", sorted(set(WRITERS) - AS_TEXT))
@given(tool=words, arguments=st.dictionaries(words, json_like, max_size=4), cuts=st.lists(st.integers(0), max_size=6))
def test_calls_that_were_written_are_read_however_they_were_sampled(name, tool, arguments, cuts):
    if name in ("gemma", "pythonic") and has_tag(arguments):
        return
    if name == "pythonic" and any(not key.isidentifier() or key in KEYWORDS for key in (tool, *arguments)):
        return
    if any(special in dumps(arguments) for special in TOKENIZER.all_special_tokens):
        return  # what a model writes as a special token is not part of its answer
    written = WRITERS[name](tool, arguments)
    for tokenizer in (TOKENIZER, LETTERS):
        turn = TurnReader(tokenizer, FORMATS[name]).read(odd_splits(tokenizer, written, cuts))
        assert [(call.status, call.name, call.arguments) for call in turn.calls] == [(OK, tool, arguments)]
        assert turn.text == ""


KEYWORDS = {
    "and",
    "as",
    "in",
    "is",
    "if",
    "or",
    "not",
    "for",
    "def",
    "del",
    "try",
    "from",
    "with",
    "pass",
    "else",
    "elif",
} | {
    *("class", "break", "async", "await", "global", "import", "lambda", "raise", "return", "while", "yield", "assert"),
    *("continue", "except", "finally", "nonlocal"),
}


@pytest.mark.parametrize("name", sorted(AS_TEXT))
@given(tool=words, arguments=st.dictionaries(words, texts, max_size=4), cuts=st.lists(st.integers(0), max_size=6))
def test_calls_without_types_are_read_as_text(name, tool, arguments, cuts):
    if any("<" in value for value in arguments.values()):
        return
    written = WRITERS[name](tool, arguments)
    for tokenizer in (TOKENIZER, LETTERS):
        turn = TurnReader(tokenizer, FORMATS[name]).read(odd_splits(tokenizer, written, cuts))
        assert [(call.status, call.name, call.arguments) for call in turn.calls] == [(OK, tool, arguments)]


fragments = [*{tag for one in FORMATS.values() for tag in (*one.tags, *one.stop_tokens)}, "<think>", "</think>"]
fragments += [
    '{"name": "f", ',
    '"arguments": {"a": 1}}',
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
]
fragments += [
    '<invoke name="f">',
    "</invoke>",
    "to=functions.f",
    "call:f{a:",
    "f(a=1)",
    "[",
    "]",
    "{",
    "}",
    "```json\n",
]
fragments += [
    "1e999",
    "\\ud800",
    "NaN",
    '{"a":' * 3000,
    "[" * 3000,
    "(" * 300,
    "9" * 5000,
    "a." * 3000,
    "\0",
    "-" * 2000,
]
junk = st.lists(st.sampled_from(fragments) | st.text(max_size=5), max_size=8).map("".join)


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(text=junk)
def test_junk_never_raises_and_what_is_read_can_be_sent(name, text):
    for tokenizer in (TOKENIZER, LETTERS):
        turn = read(name, text, tokenizer)
        for call in turn.calls:
            assert (call.status is OK) == (call.problem == "")
            assert call.status is not OK or call.name
            assert "\n" not in call.problem or call.status is not OK
            json.dumps(dict(call.arguments), allow_nan=False).encode()


@pytest.mark.parametrize("name", sorted(WRITERS))
@pytest.mark.parametrize("tokenizer", [TOKENIZER, LETTERS], ids=["tokens", "letters"])
def test_a_call_that_was_cut_is_never_read_as_a_call(name, tokenizer):
    written = WRITERS[name]("look_up", {"key": "some value", "more": "x y"})
    closed = {"deepseek": "<｜tool▁calls▁end｜>", "kimi": "<|tool_calls_section_end|>", "invoke": "\n</function_calls>"}
    never_cut(name, written.removesuffix(closed.get(name, "")), tokenizer)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LETTERS], ids=["tokens", "letters"])
@pytest.mark.parametrize("written", ['[TOOL_CALLS]f[ARGS]{"a": 1}', '[TOOL_CALLS]f{"a": 1}'])
def test_a_call_of_mistral_that_was_cut_is_never_read_as_a_call(written, tokenizer):
    never_cut("mistral", written, tokenizer)


def never_cut(name, written, tokenizer):
    whole = ids(written, tokenizer)
    for length in range(len(whole)):
        turn = TurnReader(tokenizer, FORMATS[name]).read(whole[:length])
        assert all(call.status is not OK for call in turn.calls), tokenizer.decode(whole[:length])
    assert [call.status for call in TurnReader(tokenizer, FORMATS[name]).read(whole).calls] == [OK]


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "glm", "deepseek", "kimi", "gemma"])
def test_several_calls_keep_their_order_and_the_text_around_them(name):
    written = "First. " + WRITERS[name]("f", {"a": "1"}) + "\n" + WRITERS[name]("g", {}) + " Last."
    turn = read(name, written)
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"a": "1"}), ("g", {})]
    assert (turn.number, " ".join(turn.text.split())) == (7, "First. Last.")
    assert all(call.text in written for call in turn.calls)


@pytest.mark.parametrize(
    "name", ["hermes", "qwen-xml", "glm", "deepseek", "kimi", "gemma", "invoke", "mistral", "harmony"]
)
def test_a_model_that_never_stops_calling_is_read_up_to_a_limit(name):
    turn = read(name, WRITERS[name]("f", {"a": "1"}) * 5_000)
    assert len(turn.calls) == MAX_CALLS


def test_a_tag_spelt_with_other_tokens_is_text_where_the_model_has_the_token():
    written = WRITERS["hermes"]("f", {})
    spelt = [token for letter in written for token in ids(letter)]
    turn = TurnReader(TOKENIZER, FORMATS["hermes"]).read(spelt)
    assert (turn.calls, turn.text) == ((), written)
    assert (
        TurnReader(LETTERS, FORMATS["hermes"]).read([t for x in written for t in ids(x, LETTERS)]).calls[0].name == "f"
    )


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LETTERS], ids=["tokens", "letters"])
def test_a_call_may_hold_the_text_of_its_own_end(tokenizer):
    code = "print('</tool_call>')\nprint(\"<tool_call>\")"
    turn = read("hermes", "So: " + WRITERS["hermes"]("python", {"code": code}) + WRITERS["hermes"]("f", {}), tokenizer)
    assert [(call.name, call.arguments) for call in turn.calls] == [("python", {"code": code}), ("f", {})]
    nested = 'a = "</parameter>"\nb = 1'
    assert read("qwen-xml", qwen_xml("python", {"code": nested}), tokenizer).calls[0].arguments == {"code": nested}


def test_special_tokens_inside_a_turn_shift_nothing():
    written = WRITERS["hermes"]("f", {"a": "b"})
    turn = read("hermes", f"A<s>n<|end|>swer{written[:14]}<s>{written[14:]}</s>")
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"a": "b"})]
    assert turn.text == "Answer"


@pytest.mark.parametrize("channel", ["commentary", "analysis"])
def test_harmony_calls_on_either_channel_and_in_either_order_of_the_header(channel):
    thought = "<|channel|>analysis<|message|>I look it up.<|end|>"
    body = '<|message|>{"key": 1}'
    for header in (
        f"<|start|>assistant<|channel|>{channel} to=functions.look_up <|constrain|>json",
        f"<|start|>assistant to=functions.look_up<|channel|>{channel} json",
    ):
        turn = read("harmony", thought + header + body + "<|call|>")
        assert [(c.name, c.arguments, c.status) for c in turn.calls] == [("look_up", {"key": 1}, OK)]
        assert turn.text == ""
        for end in ("", "<|end|>", "<|return|>"):
            turn = read("harmony", thought + header + body + end)
            assert [call.status for call in turn.calls] == [CallStatus.UNCLOSED]
    answer = "<|start|>assistant<|channel|>final<|message|>It is 5.<|return|>"
    assert read("harmony", thought + answer).text == "It is 5."


@pytest.mark.parametrize(
    "name, written, status",
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', CallStatus.INVALID_JSON),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}{}</tool_call>', CallStatus.INVALID_JSON),
        ("hermes", '<tool_call>{"name": "f"}', CallStatus.UNCLOSED),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', CallStatus.NO_NAME),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', CallStatus.NO_NAME),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', CallStatus.MALFORMED),
        ("hermes", "<tool_call>[]</tool_call>", CallStatus.MALFORMED),
        ("hermes", "<tool_call></tool_call>", CallStatus.INVALID_JSON),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', CallStatus.INVALID_JSON),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', CallStatus.INVALID_JSON),
        ("qwen-xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", CallStatus.UNCLOSED),
        ("qwen-xml", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", CallStatus.UNCLOSED),
        ("qwen-xml", "<tool_call><function=></function></tool_call>", CallStatus.NO_NAME),
        ("qwen-xml", "<tool_call>f()</tool_call>", CallStatus.MALFORMED),
        ("qwen-xml", "<tool_call><function=f>a = 1</function></tool_call>", CallStatus.MALFORMED),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>", CallStatus.UNCLOSED),
        ("glm", "<tool_call>f {}<arg_key>a</tool_call>", CallStatus.UNCLOSED),
        ("glm", "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", CallStatus.NO_NAME),
        ("invoke", '<invoke name="f"><parameter name="a">1</invoke>', CallStatus.UNCLOSED),
        ("invoke", '<invoke name="f">a</invoke>', CallStatus.MALFORMED),
        ("llama", '{"name": "f", "parameters": {a}}', CallStatus.INVALID_JSON),
        ("llama", "<|python_tag|>search.call(query=)", CallStatus.INVALID_JSON),
        ("mistral", "[TOOL_CALLS]f", CallStatus.INVALID_JSON),
        ("mistral", "[TOOL_CALLS]f[ARGS]{a}", CallStatus.INVALID_JSON),
        ("mistral", "[TOOL_CALLS][ARGS]{}", CallStatus.NO_NAME),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", CallStatus.MALFORMED),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>",
            CallStatus.INVALID_JSON,
        ),
        ("kimi", "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>", CallStatus.MALFORMED),
        ("pythonic", "<|tool_call_start|>[f(1)]<|tool_call_end|>", CallStatus.MALFORMED),
        ("pythonic", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>", CallStatus.INVALID_JSON),
        ("pythonic", "<|tool_call_start|>[]<|tool_call_end|>", CallStatus.NO_NAME),
        ("gemma", "<|tool_call>call:f{a:b}<tool_call|>", CallStatus.INVALID_JSON),
        ("gemma", "<|tool_call>f{}<tool_call|>", CallStatus.MALFORMED),
    ],
)
def test_a_bad_call_says_what_is_wrong(name, written, status):
    (call,) = read(name, written).calls
    assert call.status is status
    assert call.problem
    assert "\n" not in call.problem
    assert call.text in written


def test_arguments_may_be_a_text_that_is_json():
    arguments = {"a": "b", "n": [1]}
    turn = read("hermes", WRITERS["hermes"]("f", dumps(arguments)))
    assert turn.calls[0].arguments == arguments
    turn = read("hermes", WRITERS["hermes"]("f", "no JSON"))
    assert turn.calls[0].status is CallStatus.INVALID_JSON


def test_llama_takes_json_with_parameters_for_a_call_and_other_json_for_an_answer():
    two = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    assert [call.name for call in read("llama", two + "<|eot_id|>").calls] == ["f", "g"]
    more = read("llama", '{"name": "f", "parameters": {}} and more').calls
    assert [call.status for call in more] == [OK, CallStatus.MALFORMED]
    for answer in ('{"x": 1}', '{"name": "Ada"}', "[1, 2]", "{not JSON}", "The answer is {}."):
        turn = read("llama", answer)
        assert (turn.calls, turn.text) == ((), answer)


def test_llama_runs_what_follows_a_python_tag_as_code_unless_it_is_a_call():
    code = 'print("{}")\nfor i in range(3):\n    print(i)'
    (call,) = read("llama", f"Let me see.<|python_tag|>{code}<|eom_id|>").calls
    assert (call.name, call.arguments, call.status) == ("python", {"code": code}, OK)
    (call,) = read("llama", '<|python_tag|>brave_search.call(query="who (else)?")').calls
    assert (call.name, call.arguments) == ("brave_search", {"query": "who (else)?"})
    (call,) = read("llama", '<|python_tag|>{"name": "f", "parameters": {}}').calls
    assert call.name == "f"


def test_mistral_in_its_newer_form():
    for written in (
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}',
    ):
        turn = read("mistral", "Well." + written)
        assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"a": 1}), ("g", {})]
        assert turn.text == "Well."


def test_deepseek_in_its_newer_form():
    turn = read(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    )
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"a": 1})]


def test_reasoning_is_neither_text_nor_call():
    call = WRITERS["hermes"]("f", {})
    draft = WRITERS["hermes"]("draft", {})
    turn = read("hermes", f"<think>\nPerhaps {draft}?\n</think>\n\nYes.{call}")
    assert ([c.name for c in turn.calls], turn.text) == (["f"], "Yes.")
    turn = read("hermes", f"Perhaps {draft}?\n</think>\n\nYes.{call}", is_thinking=True)
    assert ([c.name for c in turn.calls], turn.text) == (["f"], "Yes.")
    for cut in (f"<think>Perhaps {draft}", f"Perhaps {draft}"):
        turn = read("hermes", cut, is_thinking=not cut.startswith("<think>"))
        assert (turn.calls, turn.text) == ((), "")
    code = "s = '<think>'"
    assert read("hermes", WRITERS["hermes"]("python", {"code": code})).calls[0].arguments == {"code": code}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_format_is_recognised_by_what_a_template_writes(name):
    written = WRITERS[name]("look_up", {"key": "some value"})
    assert recognise_format(TOKENIZER, written, "look_up", {"key": "some value"}).name == name
    assert recognise_format(TOKENIZER, "look_up some value", "look_up", {"key": "some value"}) is None


def test_a_format_that_does_not_exist_names_the_nearest():
    assert find_format("kimi", "environment.calls").name == "kimi"
    with pytest.raises(
        UserError, match=r"environment.calls = 'hermse': there is no such format of calls; did you mean 'hermes'"
    ):
        find_format("hermse", "environment.calls")
