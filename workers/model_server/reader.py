"""Turns texts into token ids, and keeps how long each text was before it was cut."""

from collections.abc import Mapping, Sequence
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
        found = encodings(self._tokenizer, texts, enough=self._max_tokens)
        tokens = {text: self._cut(encoding) for text, encoding in found.items()}
        return [tokens[text] for text in texts]

    def _cut(self, encoding: Encoding) -> Tokens:
        ids = encoding.ids
        count = len(ids)
        if count > self._max_tokens:
            ids = ids[: self._max_tokens - 1] + ids[-1:]  # keeps the closing [SEP]
        return Tokens(ids=tuple(ids), count=count)


class PairReader:
    """Reads query and text as one sequence, framed by ids of the model's own. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_tokens: int, begin: Ids, separator: Ids, end: Ids
    ) -> None:
        self._tokenizer = tokenizer
        self._begin, self._separator, self._end = begin, separator, end
        self._room = max_tokens - len(begin) - len(separator) - len(end)
        self._frame = max_tokens - self._room

    def read(self, queries: Sequence[str], texts: Sequence[str]) -> list[tuple[Tokens, int]]:
        """The joined sequence of each row, and how many tokens of it the whole query was.

        A query longer than half of the room gives way to its text, the text to the rest.
        """
        found = encodings(self._tokenizer, [*queries, *texts], enough=self._room, special=False)
        ids = {text: tuple(encoding.ids) for text, encoding in found.items()}
        return [
            (self._join(ids[query], ids[text]), len(ids[query]))
            for query, text in zip(queries, texts, strict=True)
        ]

    def _join(self, query: Ids, text: Ids) -> Tokens:
        count = self._frame + len(query) + len(text)
        query = query[: max(self._room // 2, self._room - len(text))]
        text = text[: self._room - len(query)]
        return Tokens(
            ids=self._begin + query + self._separator + text + self._end,
            count=count,
        )


def encodings(
    tokenizer: Tokenizer, texts: Sequence[str], *, enough: int, special: bool = True
) -> Mapping[str, Encoding]:
    """Each distinct text's encoding; of a very long one only its head, if that has `enough`."""
    distinct = list(dict.fromkeys(texts))
    heads = [text[:HEAD_CHARACTERS] for text in distinct]
    encoded = tokenizer.encode_batch_fast(heads, add_special_tokens=special)
    found = dict(zip(distinct, encoded, strict=True))
    for text, head in found.items():
        # A head of blanks tells nothing about what follows it.
        if len(text) > HEAD_CHARACTERS and len(head.ids) <= enough:
            found[text] = tokenizer.encode(text, add_special_tokens=special)
    return found
