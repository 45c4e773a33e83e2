"""`oip_score`: any Open Inference Protocol model that takes `query` and `text` and answers `score`.

The model's number is the score, unchanged: outside the rater's scale it is refused, never clamped
or rescaled, because a wrong scale would spoil every mean without a sign.
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

DEFAULT_TEXT_CHARS = 32_768
"""An external model's own limit is unknown here; twelve such texts stay below usual body limits."""


class OipScore:
    """The plug-in."""

    name = "oip_score"
    version = "1"
    protocol: Literal["oip"] = "oip"
    key_fields = query_text_call.KEY_FIELDS
    key_level: KeyLevel = "result"

    def check(self, spec: RaterSpec) -> Sequence[FieldProblem]:
        return query_text_call.common_problems(spec)

    def prompt(self, item: Item, spec: RaterSpec) -> str:
        limit = query_text_call.max_text_chars(spec, DEFAULT_TEXT_CHARS)
        return query_text_call.prompt(item, max_chars=limit)

    def prepare(self, items: Sequence[Item], spec: RaterSpec) -> OipCall:
        limit = query_text_call.max_text_chars(spec, DEFAULT_TEXT_CHARS)
        return query_text_call.call(items, max_chars=limit)

    def parse(
        self, items: Sequence[Item], answer: OipAnswer, spec: RaterSpec
    ) -> Sequence[Rated | Unusable]:
        scores = answer.outputs[query_text_call.SCORE]
        return [self._rate(answer, row, scores[row], spec) for row in range(len(items))]

    def _rate(self, answer: OipAnswer, row: int, score: float, spec: RaterSpec) -> Rated | Unusable:
        if unusable := query_text_call.unscorable(score):
            return unusable
        if not spec.score_min <= score <= spec.score_max:
            scale = f"{spec.score_min:g}-{spec.score_max:g}"
            return Unusable(code="out_of_range", detail=f"{score} is outside {scale}")
        if spec.integer_scores and not float(score).is_integer():
            return Unusable(code="not_integer", detail=f"{score} is no whole number")
        return query_text_call.rated(answer, row, score=float(score))
