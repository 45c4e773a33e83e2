"""Versions: what a hosted model's servers are launched with, and which one of an external counts.

The row of a hosted model's version holds all that its servers are launched with: whatever the
model's settings become, a replica of an old version comes back as the old version. Changed settings
make a candidate (`propose`); `rollouts` brings it about.

An external server tells its version with its first answer, but rows are submitted before that. So
the first version known under a label is what the label stands for, and the archive's key
(`key_version` of a model) is the label alone for it, whenever it becomes known. What a label stands
for never changes: a label and a version are one key for good, whatever was accepted or renamed in
between, and no two versions ever share one.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from django.db import transaction

from models_admin.errors import Conflict, NotFound
from models_admin.models import ModelConfig, ModelKind, ModelLabel, ModelVersion
from models_admin.policy.rollout import VersionState

_RANK: Final = {VersionState.CANDIDATE: 2, VersionState.SERVING: 1}


def settle(model: ModelConfig, found: str = "") -> None:
    """Let `found` count, or what the model's label stands for; "" while that is not known.

    For an external model whose row the caller holds locked and saves.
    """
    of_label = ModelLabel.objects.filter(model_id=model.pk, label=model.version_label)
    if found:
        label, _ = of_label.get_or_create(
            model_id=model.pk, label=model.version_label, defaults={"version": found}
        )
        model.first_version = label.version
    else:
        model.first_version = of_label.values_list("version", flat=True).first() or ""
    model.version = found or model.first_version
    model.reported = ""


def propose(model: ModelConfig, version: str, now: datetime) -> ModelVersion:
    """Return the version that a hosted model's settings ask for: a candidate, if it is not served.

    `version` is what its servers will call it, "" if nobody knows yet. The caller holds the model's
    row, if it is stored already.
    """
    rows = list(ModelVersion.objects.filter(model=model))
    alike = [row for row in rows if _is_asked(model, row) and version in ("", row.version)]
    row = max(alike, key=_rank, default=None) or ModelVersion(
        model=model, version=version, first_seen_at=now
    )
    if row.state == VersionState.SERVING:
        return row
    row.checkpoint, row.loader, row.serving = model.checkpoint, model.loader, model.serving
    row.is_withdrawn = False
    _move(row, VersionState.CANDIDATE, "its model's settings ask for it", now)
    row.save()
    if not model.started:
        # Nothing serves that it would have to prove itself beside.
        for other in rows:
            if other.pk != row.pk and other.state == VersionState.SERVING:
                _move(other, VersionState.RETIRING, "replaced while the model was stopped", now)
                other.save()
    return row


def asked(model: ModelConfig, rows: Iterable[ModelVersion]) -> ModelVersion | None:
    """Return which of a hosted model's versions its settings ask for."""
    return max((row for row in rows if _is_asked(model, row)), key=_rank, default=None)


def found_out(launched: ModelVersion, reported: str, now: datetime) -> None:
    """Take note of what servers that were launched as a version call what they serve.

    Before it ever served, its name was only computed. Later its files must have changed: they are
    another version now, and nothing can serve the one they were.
    """
    alike = ModelVersion.objects.filter(
        model_id=launched.model_id,
        version=reported,
        checkpoint=launched.checkpoint,
        loader=launched.loader,
        serving=launched.serving,
    )
    never_served = launched.state in (VersionState.CANDIDATE, VersionState.FAILED)
    if not launched.version or (never_served and not alike.exists()):
        named = ModelConfig.objects.filter(pk=launched.model_id, version=launched.version)
        named.update(version=reported)
        launched.version = reported
        launched.save(update_fields=["version"])
    elif launched.state != VersionState.FAILED:
        # Files that were put back are a version that was given up before.
        row = alike.order_by("-pk").first() or ModelVersion(
            model_id=launched.model_id,
            version=reported,
            checkpoint=launched.checkpoint,
            loader=launched.loader,
            serving=launched.serving,
            first_seen_at=now,
        )
        if row.state not in (VersionState.CANDIDATE, VersionState.SERVING):
            row.is_withdrawn = False
            why = f"its files are what version {launched.version} had"
            _move(row, VersionState.CANDIDATE, why, now)
            row.save()
        _move(launched, VersionState.FAILED, f"the files of its checkpoint are {reported} now", now)
        launched.save(update_fields=["state", "reason", "changed_at"])


def retire_version(model_id: str, version: str, *, now: datetime) -> ModelVersion:
    """Let an old version's replicas end, whatever work waits for it; repeating it is harmless.

    That work is not ended here: nothing will do it until somebody does. Raises NotFound; Conflict
    `version_serving` for the version that new work is pinned to, or that is to be.
    """
    with transaction.atomic():
        model = (
            ModelConfig.objects.select_for_update()
            .filter(pk=model_id, kind=ModelKind.HOSTED)
            .first()
        )
        rows = list(ModelVersion.objects.filter(model=model_id))
        named = [row for row in rows if row.version == version]
        if model is None or not named:
            raise NotFound(f"Hosted model {model_id!r} has no version {version!r}.")
        current = asked(model, rows)
        if version == model.version or (current is not None and current.version == version):
            raise Conflict(
                f"Version {version!r} is what model {model_id!r} is to serve; change its settings "
                "to replace it.",
                code="version_serving",
            )
        for row in named:
            if not row.is_withdrawn:
                row.is_withdrawn = True
                _move(row, VersionState.RETIRING, "an operator retired it", now)
                row.save()
    return named[0]


def _is_asked(model: ModelConfig, row: ModelVersion) -> bool:
    """Say whether a version is what settings ask for; one that was only seen fits any options."""
    if not row.state:
        return row.checkpoint == model.checkpoint
    return (row.checkpoint, row.loader, row.serving) == (
        model.checkpoint,
        model.loader,
        model.serving,
    )


def _rank(row: ModelVersion) -> tuple[int, int]:
    return _RANK.get(VersionState(row.state), 0) if row.state else 0, row.pk


def _move(row: ModelVersion, state: VersionState, reason: str, now: datetime) -> None:
    if row.state != state:
        row.changed_at = now
    row.state, row.reason = state, reason
