"""What a judge's answer is worth: a score within the scale, or a code that says why there is none.

Only what leaves no doubt is read: a JSON object with a `score`, or a lone number. Nothing is
searched for in prose, guessed, clamped, rescaled or coerced.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from workers.autoraters.protocol import ChatAnswer, RaterSpec

THINKING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
OPEN_THINKING = re.compile(r"\s*<think(?:ing)?>", re.IGNORECASE)
FENCE = re.compile(r"```[A-Za-z]*\s*\n(.*?)\n?\s*```", re.DOTALL)
NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
REFUSAL = re.compile(
    r"(?:i['\u2019]?m |i am )?(?:very )?sorry\b|i (?:can(?:no|['\u2019])t|won['\u2019]t)\b"
    r"|i(?:['\u2019]m| am) (?:unable|not able)\b|i (?:must|have to) (?:decline|refuse)\b",
    re.IGNORECASE,
)
"""How models begin when they decline."""
MINUS = "\N{MINUS SIGN}"


class Unclear(Exception):
    """The answer gives no score: a code of api.md, and words for people."""

    def __init__(self, code: str, detail: str) -> None:
        self.code, self.detail = code, detail
        super().__init__(detail)


def score_of(answer: ChatAnswer, spec: RaterSpec) -> float:
    """Return the score of an answer; raise Unclear."""
    if answer.finish_reason == "content_filter":
        raise Unclear("content_filter", "the server filtered the answer")
    if answer.finish_reason == "length":
        raise Unclear("truncated_output", "the answer was cut at its longest length")
    if answer.refusal.strip():
        raise Unclear("refusal", answer.refusal.strip()[:200])
    text = THINKING.sub("", answer.content).strip()
    if OPEN_THINKING.match(text):
        raise Unclear("unparseable", "a thinking block never ends")
    if not text:
        raise Unclear("empty_output", "there is no text")
    if fenced := FENCE.fullmatch(text):
        text = fenced[1].strip()
    return _within(_number(_value(text)), spec)


def _value(text: str) -> Any:
    """Return the `score` of a JSON object, or the text itself where it may be a lone number."""
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        if REFUSAL.match(text):
            raise Unclear("refusal", text[:200]) from None
        return text
    if not isinstance(document, dict):
        return document
    if "score" not in document:
        raise Unclear("missing_score", "a JSON object without `score`")
    return document["score"]


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    scores = [value for name, value in pairs if name == "score"]
    if len(scores) > 1 and any(score != scores[0] for score in scores):
        raise Unclear("ambiguous", "two different scores in one object")
    return dict(pairs)


def _number(value: Any) -> float:
    if isinstance(value, str):
        word = value.strip().replace(MINUS, "-")
        if NOT_FINITE.fullmatch(word):
            raise Unclear("not_finite", f"{word} is no score")
        if not NUMBER.fullmatch(word):
            raise Unclear("unparseable", f"no number: {word[:200]}")
        return _finite(word)
    if type(value) is int or type(value) is float:
        return _finite(value)
    raise Unclear("bad_type", f"the score is of type {type(value).__name__}")


def _finite(value: str | float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Unclear("not_finite", f"{number} is no score")
    return number


def _within(score: float, spec: RaterSpec) -> float:
    if not spec.score_min <= score <= spec.score_max:
        scale = f"{spec.score_min:g} to {spec.score_max:g}"
        raise Unclear("out_of_range", f"{score:g} is not within {scale}")
    if spec.integer_scores and not score.is_integer():
        raise Unclear("not_integer", f"{score:g} is no whole number")
    return score
