"""`llm_judge`: an OpenAI-compatible chat model rates a row by the operator's prompt.

One call a row. The model's text becomes a score only where it leaves no doubt (`judge_answer`);
everything else is a typed outcome without one, and the raw answer is kept with either.
"""

import json
import math
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from workers.autoraters import judge_prompt
from workers.autoraters.judge_answer import Unclear, score_of
from workers.autoraters.protocol import (
    ChatAnswer,
    ChatCall,
    FieldProblem,
    Item,
    KeyLevel,
    Rated,
    RaterSpec,
    Unusable,
)

MAX_TOKENS: Final = "max_tokens"
MAX_TEXT_CHARS: Final = "max_text_chars"
JSON_SCHEMA: Final = "json_schema"
DEFAULTS: Final = {MAX_TOKENS: 512, MAX_TEXT_CHARS: 32_768}
LIMITS: Final = {MAX_TOKENS: (1, 131_072), MAX_TEXT_CHARS: (1, 4_194_304)}
KEPT_CHARS: Final = 65_536
"""Of a raw answer, which may have 8 MiB."""
INPUT_TRUNCATED: Final = "input_truncated"

_UNKEPT = re.compile("[\0\ud800-\udfff]")


class LlmJudge:
    """The plug-in."""

    name = "llm_judge"
    version = "1"
    protocol: Literal["openai"] = "openai"
    key_fields = judge_prompt.FIELDS
    key_level: KeyLevel = "result"

    def __init__(self, new_token: Callable[[], str] = lambda: secrets.token_hex(8)) -> None:
        self._new_token = new_token

    def check(self, spec: RaterSpec) -> Sequence[FieldProblem]:
        problems = [*_template_problems(spec), *_config_problems(spec)]
        if not (math.isfinite(spec.score_min) and math.isfinite(spec.score_max)):
            problems.append(_problem("score_min", "not_finite", "the scale needs two finite ends"))
        elif spec.score_min >= spec.score_max:
            problems.append(_problem("score_max", "empty_scale", "must be larger than score_min"))
        return problems

    def prepare(self, items: Sequence[Item], spec: RaterSpec) -> ChatCall:
        (item,) = items
        token = self._new_token()
        prompt = judge_prompt.fill(
            spec.prompt_template, item, token=token, max_chars=_setting(spec, MAX_TEXT_CHARS)
        )
        return ChatCall(
            messages=[
                {"role": "system", "content": judge_prompt.RULES.replace("{token}", token)},
                {"role": "user", "content": prompt.text},
            ],
            options=_options(spec),
            notes={"lengths": prompt.lengths},
        )

    def prompt(self, item: Item, spec: RaterSpec) -> str:
        """Return what decides the score of a row: its prompt without markers, and what was cut."""
        prompt = judge_prompt.fill(
            spec.prompt_template, item, token="", max_chars=_setting(spec, MAX_TEXT_CHARS)
        )
        return f"{prompt.text}\n{json.dumps(prompt.lengths, sort_keys=True)}"

    def parse(
        self, items: Sequence[Item], answer: ChatAnswer, spec: RaterSpec
    ) -> Sequence[Rated | Unusable]:
        output: dict[str, Any] = {"answer": _kept(answer.content)}
        if answer.finish_reason:
            output["finish_reason"] = _kept(answer.finish_reason)
        if lengths := answer.notes.get("lengths"):
            output |= {INPUT_TRUNCATED: True, "lengths": lengths}
        try:
            score = score_of(answer, spec)
        except Unclear as unclear:
            detail = _kept(unclear.detail)
            return [
                Unusable(
                    code=unclear.code,
                    detail=detail,
                    ask_again=True,
                    output={**output, "detail": detail},
                )
            ]
        warnings = (INPUT_TRUNCATED,) if lengths else ()
        return [Rated(score=score, output=output, warnings=warnings)]


def _options(spec: RaterSpec) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": 0, MAX_TOKENS: _setting(spec, MAX_TOKENS)}
    if spec.config.get(JSON_SCHEMA):
        options["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "rating", "strict": True, "schema": _schema(spec)},
        }
    return options


def _schema(spec: RaterSpec) -> dict[str, Any]:
    score = {
        "type": "integer" if spec.integer_scores else "number",
        "minimum": spec.score_min,
        "maximum": spec.score_max,
    }
    return {
        "type": "object",
        "properties": {"score": score},
        "required": ["score"],
        "additionalProperties": False,
    }


def _template_problems(spec: RaterSpec) -> list[FieldProblem]:
    allowed = judge_prompt.QUERY_FIELDS if spec.key_level == "query" else judge_prompt.FIELDS
    known = ", ".join(f"{{{name}}}" for name in allowed)
    names = judge_prompt.placeholders(spec.prompt_template)
    problems = [
        _problem(
            "prompt_template",
            "unknown_placeholder",
            f"{{{name}}} names no field that this rater reads; known are {known}",
        )
        for name in names
        if name not in allowed
    ]
    if not names:
        problems.append(
            _problem(
                "prompt_template",
                "missing_placeholder",
                f"the prompt must name what is judged: at least one of {known}",
            )
        )
    return problems


def _config_problems(spec: RaterSpec) -> list[FieldProblem]:
    known = (*LIMITS, JSON_SCHEMA)
    problems = [
        _problem(f"config.{key}", "unknown_setting", f"known are {', '.join(known)}")
        for key in sorted(spec.config)
        if key not in known
    ]
    for key, (least, most) in LIMITS.items():
        value = spec.config.get(key, least)
        if type(value) is not int or not least <= value <= most:
            detail = f"must be a whole number from {least} to {most}"
            problems.append(_problem(f"config.{key}", "out_of_range", detail))
    if not isinstance(spec.config.get(JSON_SCHEMA, False), bool):
        problems.append(_problem(f"config.{JSON_SCHEMA}", "bad_type", "must be true or false"))
    return problems


def _setting(spec: RaterSpec, name: str) -> int:
    return int(spec.config.get(name, DEFAULTS[name]))


def _kept(text: str) -> str:
    """Return text as the database can keep it."""
    return _UNKEPT.sub("\ufffd", text[:KEPT_CHARS])


def _problem(field: str, code: str, detail: str) -> FieldProblem:
    return FieldProblem(field=field, code=code, detail=detail)
