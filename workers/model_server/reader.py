"""Turns texts into token ids, and keeps how long each text was before it was cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

HEAD_CHARACTERS = 65_536
"""A longer text is read up to here first: its head nearly always fills the encoder."""

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What the encoder gets of one text."""

    ids: Ids
    count: int
    """Tokens of the whole text; of a text longer than HEAD_CHARACTERS at least this many."""


class TextReader:
    """Reads texts for one model. Safe to call from any thread; releases the GIL."""

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def read(self, texts: Sequence[str]) -> list[Tokens]:
        """One Tokens a text, in order; equal texts are read once."""
        distinct = list(dict.fromkeys(texts))
        heads = [text[:HEAD_CHARACTERS] for text in distinct]
        found = dict(zip(distinct, self._tokenizer.encode_batch_fast(heads), strict=True))
        for text, head in found.items():
            # A head of blanks tells nothing about what follows it.
            if len(text) > HEAD_CHARACTERS and len(head.ids) <= self._max_tokens:
                found[text] = self._tokenizer.encode(text)
        tokens = {text: self._cut(encoding) for text, encoding in found.items()}
        return [tokens[text] for text in texts]

    def _cut(self, encoding: Encoding) -> Tokens:
        ids = encoding.ids
        count = len(ids)
        if count > self._max_tokens:
            ids = ids[: self._max_tokens - 1] + ids[-1:]  # keeps the closing [SEP]
        return Tokens(ids=tuple(ids), count=count)
