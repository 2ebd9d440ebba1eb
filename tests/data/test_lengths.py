"""Prompts are measured before a run: all rows of a file, a sample of what is made to order."""

from __future__ import annotations

import json

import pytest

from offbeat.config import from_dict
from offbeat.data import lengths
from offbeat.data.lengths import measure_prompts, refuse_long
from offbeat.data.mixture import build_mixture
from offbeat.data.prompts import BadPrompt, Renderer
from offbeat.errors import UserError
from offbeat.model.loading import load_tokenizer

SHORT, LONG = "1+1=", "1+" * 40 + "1="
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


def rows(tmp_path, *prompts: str, **keys):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n\n" for prompt in prompts))
    task = {"source": "file", "path": str(tmp_path / "data.jsonl"), "reward": "exact", **keys}
    return build_mixture(from_dict({"task": [task]}).task, seed=0)


def renderer(limit: int = 64, template: str | None = None, **options) -> Renderer:
    tokenizer = load_tokenizer("offbeat-tiny")
    tokenizer.chat_template = template
    return Renderer(tokenizer, max_prompt_tokens=limit, **options)


def measured(mixture, made: Renderer):
    (found,) = measure_prompts(mixture, made, held_out=0)
    return found


def test_all_rows_are_measured_held_out_ones_too_and_the_first_long_one_is_named(tmp_path):
    mixture = rows(tmp_path, SHORT, LONG, "2+2=", LONG + "2", held_out=0.5)
    found = measured(mixture, renderer())
    assert (found.num_prompts, found.num_long, found.longest) == (4, 2, 83)
    assert (found.first_long, found.first_tokens) == (f"{tmp_path}/data.jsonl:3", 82)
    with pytest.raises(UserError) as refused:
        refuse_long([found], "error", 64)
    assert str(refused.value) == (
        f"{tmp_path}/data.jsonl:3: its prompt has 82 tokens, over rollout.max_prompt_tokens = 64; 2 of 4 rows are too "
        'long; raise this limit to 83 or more, or set rollout.long_prompts = "skip" or "cut"'
    )
    for policy in ("skip", "cut"):
        refuse_long([found], policy, 64)


def test_a_file_of_which_no_row_is_left_is_refused(tmp_path):
    found = measured(rows(tmp_path, LONG, LONG + "1"), renderer())
    with pytest.raises(UserError, match=r"data\.jsonl:1: .* no row is left; raise the limit$"):
        refuse_long([found], "skip", 64)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_rows_that_are_short_by_their_characters_are_not_tokenised_in_a_large_file(tmp_path, monkeypatch, template):
    monkeypatch.setattr(lengths, "MEASURED", 2)
    mixture = rows(tmp_path, SHORT, SHORT, SHORT, "é" * 3, LONG, SHORT)
    found = measured(mixture, renderer(template=template))
    assert (found.num_prompts, found.num_measured, found.num_long) == (6, 4, 1)
    assert found.first_long.endswith(":9")


def test_the_room_for_ascii_is_never_more_than_what_fits():
    for template in (None, TEMPLATE):
        made = renderer(template=template)
        mixture = build_mixture(from_dict({}).task, seed=0)
        (member,) = mixture.members.values()
        member.source.chat = template is not None
        room = made.ascii_room(member)
        assert 0 < room <= 64
        problem = member.problem(0).__class__("7" * room)
        assert len(made.tokens(member, problem, 0)) <= 64


def test_an_empty_prompt_and_one_that_the_template_refuses_are_named_by_line(tmp_path):
    refuses = "{% for m in messages %}{% if 'x' in m.content %}{{ raise_exception('no x') }}{% endif %}a{% endfor %}"
    with pytest.raises(BadPrompt, match=r"data\.jsonl:3: the chat template refuses its messages: no x$"):
        measured(rows(tmp_path, SHORT, "x"), renderer(template=refuses))
    with pytest.raises(BadPrompt, match=r"data\.jsonl:1: its prompt is empty"):
        measured(rows(tmp_path, SHORT), renderer(template="{% if false %}{% endif %}"))


def test_a_sample_is_measured_of_what_is_made_to_order():
    found = measured(build_mixture(from_dict({}).task, seed=0), renderer())
    assert (found.num_prompts, found.is_sample, found.num_long) == (lengths.SAMPLE, True, 0)


def test_a_cut_keeps_the_end_of_the_text_and_the_whole_template():
    tokenizer = load_tokenizer("offbeat-tiny")

    class Source:
        name, chat, system, is_opened = "words", None, None, False

    text = "".join(str(n % 10) for n in range(90)) + "="
    (member,) = build_mixture(from_dict({}).task, seed=0).members.values()
    problem = member.problem(0).__class__(text)
    for template in (None, TEMPLATE):
        made = renderer(template=template, cuts=True)
        ids = made.tokens(Source(), problem, 0)
        told = tokenizer.decode(ids)
        assert len(ids) == 64
        assert told.startswith("<user>") == (template is not None)
        kept = told.removeprefix("<user>").removesuffix("<answer>")
        assert kept
        assert text.endswith(kept)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
    told = tokenizer.decode(renderer(template=TEMPLATE, cuts=True).tokens(Source(), problem.__class__(messages), 0))
    assert told.startswith("<system>s<user>")
    with pytest.raises(BadPrompt, match="its prompt has"):
        renderer(limit=8, template=TEMPLATE, cuts=True).tokens(Source(), problem, 0)
