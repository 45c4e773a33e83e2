"""`needs_met`: how well a result meets the need behind a query, by a sentence encoder's cosine.

Weakness by construction: a cosine says how near two texts are in topic, not whether one answers
the other, and only the beginning of a long page is read (which is then said in the rating).
"""

from collections.abc import Sequence
from typing import Literal

from workers.autoraters import query_text_call
from workers.autoraters.protocol import (
    FieldProblem,
    Item,
    KeyLevel,
    OipAnswer,
    OipCall,
    Rated,
    RaterSpec,
    Unusable,
)

LABELS = ("Fails to meet", "Slightly meets", "Moderately meets", "Highly meets", "Fully meets")
"""From the lowest fifth of the scale to the highest."""

DEFAULT_TEXT_CHARS = 8_192
"""The encoder reads 256 tokens; at 32 characters a token nothing is cut that it would have read."""

COSINE_TOLERANCE = 1e-3
"""Rounding may carry a cosine over 1; anything further out was no cosine."""


class NeedsMet:
    """The plug-in; its model answers the cosine of `query` and `text` as `score`."""

    name = "needs_met"
    version = "1"
    protocol: Literal["oip"] = "oip"
    key_fields = query_text_call.KEY_FIELDS
    key_level: KeyLevel = "result"

    def check(self, spec: RaterSpec) -> Sequence[FieldProblem]:
        problems = query_text_call.common_problems(spec)
        if spec.integer_scores:
            problems.append(
                FieldProblem(
                    field="integer_scores",
                    code="not_supported",
                    detail="a cosine is no whole number; use the label",
                )
            )
        return problems

    def prompt(self, item: Item, spec: RaterSpec) -> str:
        limit = query_text_call.max_text_chars(spec, DEFAULT_TEXT_CHARS)
        return query_text_call.prompt(item, max_chars=limit)

    def prepare(self, items: Sequence[Item], spec: RaterSpec) -> OipCall:
        limit = query_text_call.max_text_chars(spec, DEFAULT_TEXT_CHARS)
        # All outputs: our own server then counts tokens too, and another one need not know how.
        return query_text_call.call(items, max_chars=limit, all_outputs=True)

    def parse(
        self, items: Sequence[Item], answer: OipAnswer, spec: RaterSpec
    ) -> Sequence[Rated | Unusable]:
        cosines = answer.outputs[query_text_call.SCORE]
        return [self._rate(answer, row, cosines[row], spec) for row in range(len(items))]

    def _rate(
        self, answer: OipAnswer, row: int, cosine: float, spec: RaterSpec
    ) -> Rated | Unusable:
        if unusable := query_text_call.unscorable(cosine):
            return unusable
        if abs(cosine) > 1 + COSINE_TOLERANCE:
            return Unusable(code="out_of_range", detail=f"{cosine} is no cosine")
        share = min(max(cosine, 0.0), 1.0)
        score = spec.score_min + (spec.score_max - spec.score_min) * share
        return query_text_call.rated(answer, row, score=score, label=label(share))


def label(share: float) -> str:
    """Return the label of a score that stands at this share (0-1) of the scale."""
    return LABELS[min(int(share * len(LABELS)), len(LABELS) - 1)]
