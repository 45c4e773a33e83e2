"""Explaining the archive: what a request is known by, and what it would get if it were sent now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection

from fulfillment import arrays, raters
from fulfillment.keys import Keying, keying
from fulfillment.models import KeyLevel, Rater, RaterVersion, Workflow
from fulfillment.policy.freshness import Look, fresh_after, judge

MOST_ENTRIES = 20
MOST_VERSIONS = 20
"""Older versions of the rater that are looked at, so that a miss by a new one shows itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked: a row's fields, as intake checked them, and how the archive may be used."""

    rater: str
    item: Mapping[str, Any]
    max_age_s: int | None = None
    bypass: bool = False


def explain(question: Question, *, now: datetime) -> dict[str, Any]:
    """Return what the archive has for a row and why it would, or would not, be taken.

    Raises NotFound and RaterUnavailable as a workflow of the rater would.
    """
    rater = raters.find(question.rater)
    current = raters.current_version(rater, now)
    key = keying(current)
    fingerprint = key.fingerprint(question.item).hex()
    oldest = fresh_after(
        now=now,
        freshness_s=rater.freshness_s,
        max_age_s=question.max_age_s,
        accepted_at=now,
        bypass=question.bypass,
    )
    versions = {fingerprint: current, **_older(rater, current, question.item)}
    entries = _entries(list(versions), versions, current, rater, oldest, now)
    ours = [entry for entry in entries if entry["fingerprint"] == fingerprint]
    return {
        "rater": rater.pk,
        "rater_version": _name(current),
        "fingerprint": fingerprint,
        "key_level": key.level,
        **_fields(key, question.item),
        "freshness_s": rater.freshness_s,
        "look": _look(ours, bypass=question.bypass).name.lower(),
        **_flight(fingerprint),
        "entries": entries,
        "at": now,
    }


def _fields(key: Keying, item: Mapping[str, Any]) -> dict[str, Any]:
    """Say which fields entered the key, and which were given and did not."""
    prompt = None
    if key.level == KeyLevel.PROMPT and key.prompt is not None:
        try:
            prompt = key.prompt(item)
        except Exception as error:  # somebody else's code; intake then falls back to the fields
            prompt = f"{type(error).__name__}: {error}"
    return {
        "entered": [name for name in key.fields if name in item],
        "absent": [name for name in key.fields if name not in item],
        "ignored": sorted(item.keys() - set(key.fields)),
        "prompt": prompt,
    }


def _older(rater: Rater, current: RaterVersion, item: Mapping[str, Any]) -> dict[str, RaterVersion]:
    """Return the fingerprints that the row had under earlier versions of the rater."""
    older = raters.versions(rater.pk).exclude(pk=current.pk)[:MOST_VERSIONS]
    return {keying(version).fingerprint(item).hex(): version for version in older}


def _entries(
    fingerprints: Sequence[str],
    versions: Mapping[str, RaterVersion],
    current: RaterVersion,
    rater: Rater,
    oldest: datetime,
    now: datetime,
) -> list[dict[str, Any]]:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT replace(r.fingerprint::text, '-', ''), r.workflow_id, r.score, r.label,
                   r.produced_at, r.reusable
            FROM unnest(%s::uuid[]) WITH ORDINALITY AS f(fingerprint, nr)
            CROSS JOIN LATERAL (
                SELECT * FROM fulfillment_rating WHERE fingerprint = f.fingerprint
                ORDER BY produced_at DESC, id DESC LIMIT %s
            ) AS r
            ORDER BY f.nr, r.produced_at DESC, r.id DESC LIMIT %s
            """,
            [arrays.uuids(fingerprints), MOST_ENTRIES, MOST_ENTRIES],
        )
        rows = cursor.fetchall()
    names = dict(
        Workflow.objects.filter(pk__in={row[1] for row in rows}).values_list("pk", "public_id")
    )
    entries, taken = [], False
    for fingerprint, workflow_id, score, label, produced_at, reusable in rows:
        refused = judge(
            produced_at=produced_at,
            reusable=reusable,
            produced_after=oldest,
            freshness_s=rater.freshness_s,
            now=now,
        )
        version = versions[fingerprint]
        if version.pk != current.pk:
            refused = "other_version"
        elif refused is None and taken:
            refused = "not_the_newest"
        taken = taken or refused is None
        entries.append(
            {
                "fingerprint": fingerprint,
                "rater_version": _name(version),
                "score": score,
                "label": label,
                "produced_at": produced_at,
                "age_s": int((now - produced_at).total_seconds()),
                "workflow": names.get(workflow_id),
                "reusable": reusable,
                "fresh": refused in {None, "not_the_newest"},
                "refused": refused,
            }
        )
    return entries


def _look(entries: Sequence[Mapping[str, Any]], *, bypass: bool) -> Look:
    if bypass:
        return Look.BYPASSED
    if any(entry["refused"] is None for entry in entries):
        return Look.HIT
    stale = any(entry["refused"] in {"stale", "too_old"} for entry in entries)
    return Look.STALE if stale else Look.MISS


def _flight(fingerprint: str) -> dict[str, Any]:
    """Say whether an equal item is being computed, or has failed for good a moment ago."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT EXISTS (SELECT FROM fulfillment_flight WHERE fingerprint = %s::uuid),
                   (SELECT code FROM fulfillment_failedflight WHERE fingerprint = %s::uuid)
            """,
            [fingerprint, fingerprint],
        )
        in_flight, failed = cursor.fetchone()
    return {"in_flight": in_flight, "failed": failed}


def _name(version: RaterVersion) -> str:
    return f"{version.rater_id}@{version.number}"
