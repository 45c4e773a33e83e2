"""Looks at an external server when it is registered: does it answer as its protocol says?

One small question: the model's metadata, the list of models, or, where pairs are to be scored, one
pair of two short words, by the code that executors call models with. A server that is not up, is
busy or refuses the key may be right all the same: that is a warning. Only what no such server can
be is refused: a page instead of a document, a redirect, a list without scores. Nothing of what it
says is repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from django.conf import settings
from django.utils.module_loading import import_string

from models_admin import checking, probe
from models_admin.asking import Ask, Question
from models_admin.directory import call_headers, external_endpoint
from models_admin.models import ModelConfig, Protocol
from models_admin.policy.health import version_of

ANSWER_S: Final = 2.0
_LONGEST_BYTES: Final = 1 << 20
"""Hosted services list hundreds of models."""
_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""From which a date in Retry-After is reckoned, for which nobody waits here."""
_NO_SCORES: Final = frozenset(
    {"bad_answer", "incomplete_response", "count_mismatch", "bad_index", "bad_type", "bad_shape"}
)
"""What comes of a pair where something else than a scoring endpoint answers."""
_LATER: Final = "It is registered all the same, and looked at again every ten seconds."


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What was seen of an external server; `wrong` and `warning` are for people, or ""."""

    version: str = ""
    """What the server names as the model's version, if one."""
    wrong: str = ""
    warning: str = ""


Look = Callable[[ModelConfig], Seen]


def look(model: ModelConfig) -> Seen:
    """Ask the server of an external model once; takes ANSWER_S at most."""
    if model.endpoint:
        return _asked_to_score(model)
    if model.protocol == Protocol.OIP:
        asked = f"/v2/models/{quote(model.model_name, safe='')}"
        root = model.url.rstrip("/")
    else:
        asked = "/v1/models"
        root = model.url.rstrip("/").removesuffix("/v1")
    headers = call_headers(model)
    answer = probe.ask(
        f"{root}{asked}", timeout_s=ANSWER_S, headers=headers, longest_bytes=_LONGEST_BYTES
    )
    seen = _judged(model, asked, answer)
    return replace(seen, version=checking.unsaid(seen.version, headers.values()))


def _asked_to_score(model: ModelConfig) -> Seen:
    ask: Ask = import_string(settings.AIRS_MODEL_TRIAL)
    question = Question(rows=[("tea", "tea")])
    answer = ask(external_endpoint(model), question, min(ANSWER_S, model.timeout_s), _ANY_TIME)
    if not answer.code:
        return Seen(version=answer.version)
    path = model.get_endpoint_display().partition(":")[0]
    if answer.code == "redirect_not_followed":
        return Seen(wrong=f"POST {path} redirects, which is not followed: give the address itself")
    if answer.code in _NO_SCORES:
        return Seen(
            wrong=f"POST {path} is answered without one score for one pair ({answer.code}): no "
            f"server of the endpoint {model.endpoint} stands there"
        )
    return _warned(f"a pair sent to {path} gets no score: {answer.code}")


def _judged(model: ModelConfig, asked: str, answer: probe.Answer | None) -> Seen:
    if answer is None:
        return _warned(f"nobody gives a whole answer to GET {asked} within {ANSWER_S:g} s")
    if 300 <= answer.status < 400:
        return Seen(
            wrong=f"GET {asked} redirects (HTTP {answer.status}), which is not followed: give the "
            "address itself"
        )
    if answer.status in (401, 403):
        return _warned(f"the server refuses the key (HTTP {answer.status}), or wants one")
    if answer.status == 404:
        return _warned(f"the server has no {asked} (HTTP 404)")
    if answer.status != 200:
        return _warned(f"GET {asked} is answered with HTTP {answer.status}")
    if not answer.body:
        return Seen(
            wrong=f"GET {asked} is answered with something else than a JSON object (HTTP 200): no "
            f"server of the protocol {model.protocol} stands there"
        )
    if model.protocol == Protocol.OIP:
        return Seen(version=version_of(answer.body))
    data = answer.body.get("data")
    listed = data if isinstance(data, list) else []
    names = [each.get("id") for each in listed if isinstance(each, dict)]
    if names and model.model_name not in names:
        return Seen(warning=f"The server lists {len(names)} models, none named as model_name says.")
    return Seen()


def _warned(what: str) -> Seen:
    return Seen(warning=f"{what[0].upper()}{what[1:]}. {_LATER}")
