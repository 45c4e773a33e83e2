"""Raters: what may be registered, and which version of one a workflow is pinned to.

A rater version is everything that decides a score. It is computed from the rater, the installed
plug-in and the model's version each time a workflow is created, so that a new plug-in, a new
checkpoint or a changed setting makes a new version and never mixes with the old one's ratings.
Nothing here calls a model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Max, QuerySet
from django.utils.module_loading import import_string

from fulfillment import bell
from fulfillment.errors import (
    Conflict,
    FulfillmentError,
    InvalidFields,
    NotFound,
    RaterUnavailable,
)
from fulfillment.expiry import newest_rating_id
from fulfillment.model_directory import model_directory
from fulfillment.models import KeyLevel, Rater, RaterVersion
from fulfillment.policy.batching import MAX_BATCH_SIZE
from fulfillment.policy.fingerprint import version_digest

PAUSED_BY_OPERATOR = "operator"
MAX_DEADLINE_S = 30 * 86_400
MAX_FRESHNESS_S = 10 * 365 * 86_400
MAX_ATTEMPTS = 100
MAX_TEMPLATE_CHARACTERS = 262_144
_VERSION_TRIES = 5

SCORE_FIELDS = frozenset(
    {
        "autorater",
        "model_id",
        "key_level",
        "score_min",
        "score_max",
        "integer_scores",
        "prompt_template",
        "config",
    }
)
"""Settings of a rater that decide a score: changing one makes a new version."""


class FieldProblem(Protocol):
    """One reason why a rater cannot work, as a plug-in gives it."""

    @property
    def field(self) -> str: ...
    @property
    def code(self) -> str: ...
    @property
    def detail(self) -> str: ...


class Plugin(Protocol):
    """What the callable named by AIRS_RATER_PLUGINS tells of a plug-in."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def key_fields(self) -> tuple[str, ...]: ...
    @property
    def key_level(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    @property
    def prompt(self) -> Callable[[Mapping[str, Any], Any], str] | None:
        """Makes of a row and a `Spec` the text that decides at key level `prompt`, if it can."""

    @property
    def check(self) -> Callable[[Any], Sequence[FieldProblem]]:
        """Takes any object with the attributes of `Spec`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What is stored as RaterVersion.spec: the fields of workers.autoraters.RaterSpec."""

    rater_id: str
    autorater: str
    plugin_version: str
    model_id: str
    model_version: str
    key_level: str
    score_min: float
    score_max: float
    integer_scores: bool
    prompt_template: str
    config: Mapping[str, Any]


def find(rater_id: str) -> Rater:
    """Return a rater with its current version; raise NotFound."""
    rater = Rater.objects.select_related("current_version").filter(pk=rater_id).first()
    if rater is None:
        raise NotFound(f"There is no rater {rater_id!r}.")
    return rater


def register(rater: Rater, *, now: datetime) -> tuple[Rater, bool]:
    """Store a new rater and its first version; return it and whether it is new.

    Registering the same rater again changes nothing; another one of the same id is a Conflict.
    """
    if not rater.key_level:
        rater.key_level = _default_key_level(rater.autorater)
    refuse(problems(rater))
    rater.created_at = now
    try:
        with transaction.atomic():
            rater.save(force_insert=True)
            # As the database gives it back: jsonb writes numbers of `config` in its own form.
            rater.refresh_from_db()
            current_version(rater, now)
    except IntegrityError as error:
        existing = find(rater.pk)
        if _settings(existing) == _settings(rater):
            return existing, False
        raise Conflict(
            f"There is a rater {rater.pk!r} already; PATCH changes it.", code="rater_exists"
        ) from error
    return find(rater.pk), True


def change(*, rater_id: str, changes: Mapping[str, Any], now: datetime) -> Rater:
    """Change settings of a rater; those that decide the score make a new version.

    Workflows that exist keep the version they were created with.
    """
    with transaction.atomic():
        rater = Rater.objects.select_for_update().filter(pk=rater_id).first()
        if rater is None:
            raise NotFound(f"There is no rater {rater_id!r}.")
        for name, value in changes.items():
            setattr(rater, name, value)
        refuse(problems(rater))
        if changes:
            rater.save(update_fields=[*changes])
            rater.refresh_from_db()
        if SCORE_FIELDS & changes.keys():
            current_version(rater, now)
    return find(rater_id)


def pause(*, rater_id: str, code: str, detail: str, now: datetime) -> Rater:
    """Stop sending for a rater; its items wait. A rater that is paused stays as it is."""
    find(rater_id)
    Rater.objects.filter(pk=rater_id, paused_code="").update(
        paused_code=code, paused_detail=detail, paused_at=now
    )
    return find(rater_id)


def resume(*, rater_id: str) -> Rater:
    """Send for a rater again, whatever paused it."""
    find(rater_id)
    Rater.objects.filter(pk=rater_id).update(paused_code="", paused_detail="", paused_at=None)
    bell.ring()
    return find(rater_id)


def current_version(rater: Rater, now: datetime) -> RaterVersion:
    """Return the version a new workflow is pinned to, made now if anything in it changed.

    Safe beside others: two that find the same change get the same row.
    """
    spec = _spec(rater)
    digest = _digest(spec)
    for _ in range(_VERSION_TRIES):
        version = RaterVersion.objects.filter(rater=rater, digest=digest).first()
        if version is None:
            version = _add_version(rater, spec, digest, now)
        if version is not None:
            break
    else:
        raise Conflict("The rater is being changed; try again.", code="rater_changing")
    if version.retired_at is not None:  # the rater was changed back to what it had been
        RaterVersion.objects.filter(pk=version.pk).update(retired_at=None)
        version.retired_at = None
    if rater.current_version_id != version.pk:
        Rater.objects.filter(pk=rater.pk).update(current_version=version)
        rater.current_version = version
    return version


def coming_version(rater: Rater, now: datetime) -> RaterVersion:
    """Return the version a new workflow would be pinned to, and store nothing.

    One that no workflow has had has no key and number 0. Raises RaterUnavailable.
    """
    spec = _spec(rater)
    digest = _digest(spec)
    version = RaterVersion.objects.filter(rater=rater, digest=digest).first()
    return version or RaterVersion(
        rater=rater, number=0, digest=digest, spec=asdict(spec), created_at=now
    )


def versions(rater_id: str) -> QuerySet[RaterVersion]:
    """Return all versions of a rater, newest first."""
    find(rater_id)
    return RaterVersion.objects.filter(rater_id=rater_id).order_by("-number")


def find_version(rater_id: str, number: int) -> RaterVersion:
    """Return one version of a rater; raise NotFound."""
    version = versions(rater_id).filter(number=number).first()
    if version is None:
        raise NotFound(f"Rater {rater_id!r} has no version {number}.")
    return version


def plugin_of(autorater: str) -> Plugin:
    """Return what an installed plug-in tells of itself; raise RaterUnavailable."""
    describe: Callable[[str], Plugin] = import_string(settings.AIRS_RATER_PLUGINS)
    try:
        return describe(autorater)
    except Exception as error:  # somebody else's module: anything can happen while it loads
        raise _unavailable(
            {"field": "autorater", "code": "unknown_autorater", "detail": str(error)}
        ) from error


def problems(rater: Rater) -> list[dict[str, str]]:
    """Return why a rater cannot work, a place in the form each; empty when it can."""
    found = _setting_problems(rater)
    try:
        plugin = plugin_of(rater.autorater)
    except RaterUnavailable as error:
        return [*found, *_as_errors(error)]
    model = model_directory().describe(rater.model_id)
    if model is None:
        found.append(_unknown_model(rater.model_id))
    elif model.protocol != plugin.protocol:
        found.append(_wrong_protocol(rater.model_id, model.protocol, plugin))
    if rater.key_level == KeyLevel.PROMPT and plugin.prompt is None:
        found.append(_no_prompt(plugin))
    spec = _spec_of(rater, plugin, model.version if model else "")
    found += [
        {"field": "model" if p.field == "model_id" else p.field, "code": p.code, "detail": p.detail}
        for p in plugin.check(spec)
    ]
    return found


def refuse(found: Sequence[Mapping[str, str]]) -> None:
    """Raise InvalidFields if there are problems."""
    if found:
        names = ", ".join(sorted({problem["field"] for problem in found}))
        raise InvalidFields(
            f"The rater cannot work: see {names} in `errors`.",
            # A lone problem lends its code to the answer, so that clients need not look deeper.
            code=found[0]["code"] if len(found) == 1 else None,
            errors=found,
        )


def _add_version(rater: Rater, spec: Spec, digest: UUID, now: datetime) -> RaterVersion | None:
    """Return the new version, None if another process took its number or digest first."""
    number = RaterVersion.objects.filter(rater=rater).aggregate(n=Max("number"))["n"] or 0
    try:
        with transaction.atomic():
            return RaterVersion.objects.create(
                rater=rater,
                number=number + 1,
                digest=digest,
                spec=asdict(spec),
                created_at=now,
                erased_to=newest_rating_id(),
            )
    except IntegrityError:
        return None


def _spec(rater: Rater) -> Spec:
    """Return what decides the rater's scores now; raise RaterUnavailable."""
    plugin = plugin_of(rater.autorater)
    model = model_directory().describe(rater.model_id)
    if model is None:
        raise _unavailable(_unknown_model(rater.model_id))
    if model.protocol != plugin.protocol:
        raise _unavailable(_wrong_protocol(rater.model_id, model.protocol, plugin))
    return _spec_of(rater, plugin, model.version)


def _spec_of(rater: Rater, plugin: Plugin, model_version: str) -> Spec:
    return Spec(
        rater_id=rater.pk,
        autorater=plugin.name,
        plugin_version=plugin.version,
        model_id=rater.model_id,
        model_version=model_version,
        key_level=rater.key_level,
        score_min=rater.score_min,
        score_max=rater.score_max,
        integer_scores=rater.integer_scores,
        prompt_template=rater.prompt_template,
        config=rater.config,
    )


def _digest(spec: Spec) -> UUID:
    return UUID(bytes=version_digest(**asdict(spec)))


def _default_key_level(autorater: str) -> str:
    try:
        return plugin_of(autorater).key_level
    except RaterUnavailable as error:
        raise InvalidFields(error.detail, errors=_as_errors(error)) from error


def _unavailable(problem: Mapping[str, str]) -> RaterUnavailable:
    return RaterUnavailable(problem["detail"], errors=[problem])


def _as_errors(error: FulfillmentError) -> list[dict[str, str]]:
    return [dict(problem) for problem in error.errors]


def _unknown_model(model_id: str) -> dict[str, str]:
    return {
        "field": "model",
        "code": "unknown_model",
        "detail": f"There is no model {model_id!r}; register it first.",
    }


def _wrong_protocol(model_id: str, protocol: str, plugin: Plugin) -> dict[str, str]:
    return {
        "field": "model",
        "code": "protocol_mismatch",
        "detail": f"Model {model_id!r} is called by {protocol}, autorater {plugin.name} needs "
        f"{plugin.protocol}.",
    }


def _no_prompt(plugin: Plugin) -> dict[str, str]:
    return {
        "field": "key_level",
        "code": "not_supported",
        "detail": f"Autorater {plugin.name} renders no prompt.",
    }


def _settings(rater: Rater) -> dict[str, Any]:
    names = (*SCORE_FIELDS, "mode", "freshness_s", "deadline_s", "max_qps", "batch_size")
    return {name: getattr(rater, name) for name in (*names, "max_attempts")}


def _setting_problems(rater: Rater) -> list[dict[str, str]]:
    """Return which settings are out of bounds by themselves, whoever sets them."""
    bounds: list[tuple[str, float | None, float, float]] = [
        ("freshness_s", rater.freshness_s, 1, MAX_FRESHNESS_S),
        ("deadline_s", rater.deadline_s, 1, MAX_DEADLINE_S),
        ("batch_size", rater.batch_size, 1, MAX_BATCH_SIZE),
        ("max_attempts", rater.max_attempts, 1, MAX_ATTEMPTS),
        ("max_qps", rater.max_qps, 0.001, 1e6),
    ]
    found = [
        {"field": name, "code": "out_of_range", "detail": f"Must lie in {least:g} to {most:g}."}
        for name, value, least, most in bounds
        if value is not None and not least <= value <= most
    ]
    scale = (rater.score_min, rater.score_max)
    if not all(map(math.isfinite, scale)) or scale[0] >= scale[1]:
        found.append(
            {
                "field": "score_max",
                "code": "out_of_range",
                "detail": "score_min and score_max must be finite, the first below the second.",
            }
        )
    if len(rater.prompt_template) > MAX_TEMPLATE_CHARACTERS:
        found.append(
            {
                "field": "prompt_template",
                "code": "field_too_long",
                "detail": f"At most {MAX_TEMPLATE_CHARACTERS} characters.",
            }
        )
    if not _storable(rater.config):
        found.append(
            {
                "field": "config",
                "code": "bad_value",
                "detail": "NUL, lone surrogates and integers beyond 64 bits cannot be kept.",
            }
        )
    return found


def _storable(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, Mapping):
        return all(_storable(k) and _storable(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_storable, value))
    return not isinstance(value, int) or -(1 << 63) <= value < 1 << 64
