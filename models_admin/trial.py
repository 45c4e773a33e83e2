"""Trying a model: one real call with a few texts of a person, never archived."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from django.conf import settings
from django.utils.module_loading import import_string

from models_admin import services
from models_admin.asking import Answer, Ask, Question
from models_admin.directory import directory
from models_admin.errors import Conflict
from models_admin.models import ModelConfig, Protocol
from models_admin.services import Problem, refuse
from models_admin.services.audit import audit

MOST_ROWS: Final = 8
MOST_CHARACTERS: Final = 20_000
"""Of one text."""
LONGEST_S: Final = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A question, where it was sent, and what came of it."""

    address: str
    answer: Answer
    question: Question = field(repr=False)


def try_model(model_id: str, question: Question, *, now: datetime, actor: str = "") -> Trial:
    """Ask a model once, at an address that could be sent to now.

    Raises InvalidFields for a question that it cannot be asked, Conflict when it has no address.
    """
    model = services.find_model(model_id)
    refuse(_problems(model, question))
    replica = next((r for r in directory.replicas(now) if r.model_id == model_id), None)
    endpoint = None if replica is None else directory.endpoint(replica.key)
    if endpoint is None:
        raise Conflict(
            f"No replica of model {model_id!r} is ready: start it, or look at its replicas.",
            code="not_ready",
        )
    ask: Ask = import_string(settings.AIRS_MODEL_TRIAL)
    asked = {"rows": len(question.rows) or 1, "code": "asked"}
    # Written first: should this process die before the answer, the model was asked all the same.
    entry = audit("model_tried", model_id, actor, kind="model", detail=asked)
    answer = ask(endpoint, question, min(LONGEST_S, endpoint.timeout_s), now)
    entry.detail = asked | {"code": answer.code or "answered"}
    entry.save(update_fields=["detail"])
    return Trial(address=endpoint.url, answer=answer, question=question)


def _problems(model: ModelConfig, question: Question) -> list[Problem]:
    """Return what is wrong with a question; texts are never cut before they are sent."""
    if model.rater_protocol == Protocol.OIP:
        texts = {f"rows.{number}": text for number, row in enumerate(question.rows) for text in row}
        if question.message:
            return [_wrong("message", "not_allowed", "is for chat models; this one takes rows")]
        if not 1 <= len(question.rows) <= MOST_ROWS:
            return [_wrong("rows", "out_of_range", f"1 to {MOST_ROWS} rows of query and text")]
    else:
        texts = {"message": question.message}
        if question.rows:
            return [
                _wrong("rows", "not_allowed", "is for models that score; tell this one a message")
            ]
        if not question.message.strip():
            return [_wrong("message", "empty_field", "what the model is told")]
    return [
        _wrong(field, "field_too_long", f"at most {MOST_CHARACTERS:,} characters a text")
        for field, text in texts.items()
        if len(text) > MOST_CHARACTERS
    ]


def _wrong(field: str, code: str, detail: str) -> Problem:
    return Problem(field=field, code=code, detail=detail)
