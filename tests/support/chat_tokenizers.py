"""Tokenizers for tests of chat templates: bytes with merges, and the special tokens that a template uses."""

import functools
import itertools
import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|>|<｜[^<>\s]+?｜>|<[a-z_]*turn\|?>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_\w+>|<end_of_utterance>"
    r"|\[/?[A-Z_]+\]|</?s>"
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""Tokens that are not special in the models that have them."""


@functools.cache
def chat_tokenizer(template: str, added: tuple[str, ...] = ADDED, special: tuple[str, ...] = ()):
    """A tokenizer that knows the special tokens of `template`, and the tokens `added` as far as the template uses
    them. Its merges are those of the template's own words, so that line breaks and blanks grow together."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    words = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    raw.train_from_iterator([template] * 2, words)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    found = sorted(({*SPECIAL.findall(template), *special}) - {"<s>", "</s>"})
    made.add_special_tokens({"extra_special_tokens": found})
    made.add_tokens([AddedToken(text, special=False) for text in added if text in template])
    made.chat_template = template
    return made


def odd_splits(tokenizer, text: str, cuts) -> list[int]:
    """Ids of a text as a model might sample it: the text is cut at `cuts`, and each part is tokenised by itself. No cut
    falls inside an added token."""
    marks = re.compile("|".join(map(re.escape, sorted(tokenizer.get_added_vocab(), key=len, reverse=True))))
    inside = {at for found in marks.finditer(text) for at in range(found.start() + 1, found.end())}
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)} - inside)
    parts = [text[a:b] for a, b in itertools.pairwise(ends)]
    return [id for part in parts for id in tokenizer(part, add_special_tokens=False)["input_ids"]]
