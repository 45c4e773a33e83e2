"""What the raters share that send `query` and `text` to an OIP model and read a `score`."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from workers.autoraters.page_text import PageText, page_text
from workers.autoraters.protocol import (
    FieldProblem,
    Item,
    OipAnswer,
    OipCall,
    Rated,
    RaterSpec,
    Unusable,
)

KEY_FIELDS = ("query_text", "title", "html", "text")
SCORE = "score"
TOKEN_COUNTS = ("tokens", "query_tokens")
MAX_TOKENS = "max_tokens"
INPUT_TRUNCATED = "input_truncated"
MAX_TEXT_CHARS = "max_text_chars"
LARGEST_TEXT_CHARS = 1_000_000
NO_TEXT = "no_text"


def call(items: Sequence[Item], *, max_chars: int, all_outputs: bool = False) -> OipCall:
    """Return the call for these rows, with what was cut of each as its note.

    A row without any text is sent all the same: an empty page is a result too, and a bad one.
    """
    pages = [page_text(item, max_chars=max_chars) for item in items]
    return OipCall(
        inputs={
            "query": [str(item["query_text"]) for item in items],
            "text": [page.text for page in pages],
        },
        outputs=(SCORE,),
        all_outputs=all_outputs,
        notes=_notes(pages),
    )


def _notes(pages: Sequence[PageText]) -> Sequence[Mapping[str, Any]]:
    """Return what to say with each rating; nothing at all where that is nothing for all rows."""
    if not any(page.lengths or page.blank for page in pages):
        return ()
    return [{"blank": page.blank, "lengths": page.lengths} for page in pages]


def prompt(item: Item, *, max_chars: int) -> str:
    """Return what decides a row's score: the two texts that are sent, and what was cut of them.

    Pages whose visible text is equal share a rating then, whatever their HTML; the cut counts as it
    is told with the rating.
    """
    page = page_text(item, max_chars=max_chars)
    return json.dumps([str(item["query_text"]), page.text, page.lengths], ensure_ascii=False)


def rated(answer: OipAnswer, row: int, *, score: float, label: str = "") -> Rated:
    """Return the score with what its reader must know: that text was cut, or was missing."""
    if not answer.notes and MAX_TOKENS not in answer.parameters:
        return Rated(score=score, label=label)
    noted = answer.notes[row] if answer.notes else {}
    lengths = {**noted.get("lengths", {}), **tokens_cut(answer, row)}
    warnings = (INPUT_TRUNCATED,) * bool(lengths) + (NO_TEXT,) * bool(noted.get("blank"))
    return Rated(
        score=score,
        label=label,
        output={INPUT_TRUNCATED: True, "lengths": lengths} if lengths else None,
        warnings=warnings,
    )


def tokens_cut(answer: OipAnswer, row: int) -> Mapping[str, Mapping[str, int]]:
    """Return what the model itself cut, if it says so as our own server does.

    It answers how many tokens the inputs had (outputs `tokens` and `query_tokens`) and how many it
    takes (parameter `max_tokens`). A model that says nothing is taken to have read everything.
    """
    limit = answer.parameters.get(MAX_TOKENS)
    if type(limit) is not int:
        return {}
    counts = {name: answer.outputs[name][row] for name in TOKEN_COUNTS if name in answer.outputs}
    return {
        name: {"original": int(count), "used": limit}
        for name, count in counts.items()
        if count > limit
    }


def max_text_chars(spec: RaterSpec, default: int) -> int:
    return int(spec.config.get(MAX_TEXT_CHARS, default))


def unscorable(value: float) -> Unusable | None:
    """Return why a number can be no score at all, None when it can."""
    if not math.isfinite(value):
        return Unusable(code="not_finite", detail=f"the model answered {value}")
    return None


def common_problems(spec: RaterSpec) -> list[FieldProblem]:
    """Return what is wrong with the settings every rater of this kind has."""
    problems = []
    if not (math.isfinite(spec.score_min) and math.isfinite(spec.score_max)):
        problems.append(_problem("score_min", "not_finite", "the scale needs two finite ends"))
    elif spec.score_min >= spec.score_max:
        problems.append(_problem("score_max", "empty_scale", "must be larger than score_min"))
    if spec.key_level == "query":
        problems.append(
            _problem(
                "key_level",
                "not_supported",
                "each row is rated for itself: use 'result', or 'prompt' for the text that is sent",
            )
        )
    if spec.prompt_template:
        problems.append(_problem("prompt_template", "not_supported", "no prompt is sent"))
    return problems + _config_problems(spec.config)


def _config_problems(config: Mapping[str, Any]) -> list[FieldProblem]:
    problems = [
        _problem(f"config.{key}", "unknown_setting", f"known is {MAX_TEXT_CHARS}")
        for key in sorted(config)
        if key != MAX_TEXT_CHARS
    ]
    limit = config.get(MAX_TEXT_CHARS, 1)
    if type(limit) is not int or not 1 <= limit <= LARGEST_TEXT_CHARS:
        problems.append(
            _problem(
                f"config.{MAX_TEXT_CHARS}",
                "out_of_range",
                f"must be a whole number of characters from 1 to {LARGEST_TEXT_CHARS}",
            )
        )
    return problems


def _problem(field: str, code: str, detail: str) -> FieldProblem:
    return FieldProblem(field=field, code=code, detail=detail)
