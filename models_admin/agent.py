"""The host agent's pass: what is wanted against what lives, brought together.

`run_once(now)` reads the wanted models, looks at the backend, asks `policy.reconcile` for one step
a replica, takes it and writes the rows. A row is written before its server starts, so that a
server is never without one. The loop around it is `manage.py host_models`.
"""

import contextlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from django.db import Error, connection

from models_admin import checkpoints, utilisation
from models_admin.devices import Devices
from models_admin.errors import CheckpointRefused
from models_admin.hosting import HostingBackend, Launch, LaunchFailed, Living, ReplicaName
from models_admin.models import ModelConfig, ModelKind, ModelServer, ModelVersion
from models_admin.policy.reconcile import (
    LIVE,
    Act,
    Desired,
    Record,
    Replica,
    Seen,
    ServerState,
    Step,
    held_back,
    launch_failed,
    reconcile,
)

logger = logging.getLogger(__name__)

_LOCK = "models_admin.host_agent."
_ROW_FIELDS = (
    *("state", "reason", "last_error", "address", "pid", "version", "boot_id", "starts"),
    *("generation", "failures", "started_at", "ready_at", "draining_at", "next_start_at"),
    *("heartbeat_at", "busy_seconds", "rows_total", "queue_rows"),
)
_HEARTBEAT_STEP = timedelta(seconds=1.5)
"""Rows are written when there is news; a heartbeat is news when it is so much younger."""
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
_NOTHING_WANTED = Desired(replicas=0, generation=0)


class HostAgent:
    """One run of the agent of a machine; `boot_id` tells its rows from those of earlier runs."""

    def __init__(
        self, *, name: str, boot_id: UUID, backend: HostingBackend, checkpoint_root: Path
    ) -> None:
        self._name = name
        self._boot_id = boot_id
        self._backend = backend
        self._checkpoint_root = checkpoint_root
        self._ended: dict[ReplicaName, str] = {}
        self._utilisation = utilisation.Sampler(name)
        self._devices = Devices()
        self._session: Any = None

    def lead(self) -> bool:
        """Say whether this is the one agent of its name; take the lock for it if it is free.

        The lock lives and ends with the database session: who loses the session loses the lock,
        and has to ask again on the next one.
        """
        connection.ensure_connection()
        if self._session is connection.connection:
            return True
        with connection.cursor() as cursor:
            # A frozen agent must not keep the lock: its session ends, and a stand-by takes over.
            cursor.execute("SET idle_session_timeout = '30s'")
            cursor.execute(
                "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [_LOCK + self._name]
            )
            (held,) = cursor.fetchone()
        self._session = connection.connection if held else None
        return bool(held)

    def stand_by(self) -> None:
        """Another agent leads: a server of ours beside its servers would hold the device twice."""
        self._backend.stop_all()

    def run_once(self, now: datetime) -> None:
        """Bring what lives one step nearer to what is wanted."""
        seen = self._backend.observe()
        # Kept until a row has taken note of it: a failed pass must not forget how a server ended.
        self._ended.update(seen.ended)
        models = self._models()
        rows = self._rows()
        self._devices.look(seen.living.keys(), models)
        for model_id in sorted({name.model_id for name in (*rows, *seen.living)} | models.keys()):
            self._reconcile(model_id, models.get(model_id), rows, seen.living, now)
        self._utilisation.store_if_due(now)

    def stop(self, now: datetime | None) -> None:
        """End all servers; rows say so before they end, if the database can be reached."""
        own = ModelServer.objects.filter(agent=self._name, boot_id=self._boot_id)
        if now is not None:
            with contextlib.suppress(Error):
                own.filter(state__in=LIVE).update(
                    state=ServerState.DRAINING, draining_at=now, reason="its agent stops"
                )
        self._backend.stop_all()
        if now is not None:
            with contextlib.suppress(Error):
                own.update(
                    state=ServerState.STOPPED,
                    reason="its agent stopped",
                    pid=None,
                    address="",
                    next_start_at=None,
                    draining_at=None,
                    ready_at=None,
                )

    def _models(self) -> Mapping[str, ModelConfig]:
        hosted = ModelConfig.objects.filter(kind=ModelKind.HOSTED).select_related("pool")
        return {model.id: model for model in hosted if model.agent == self._name}

    def _rows(self) -> dict[ReplicaName, ModelServer]:
        rows = ModelServer.objects.filter(agent=self._name)
        return {ReplicaName(row.model_id, row.ordinal): row for row in rows}

    def _reconcile(
        self,
        model_id: str,
        model: ModelConfig | None,
        rows: Mapping[ReplicaName, ModelServer],
        living: Mapping[ReplicaName, Living],
        now: datetime,
    ) -> None:
        names = {name for name in (*rows, *living) if name.model_id == model_id}
        replicas = [self._replica(name, rows.get(name), living.get(name)) for name in names]
        wanted = _NOTHING_WANTED if model is None else _desired(model)
        changed = []
        for step in reconcile(wanted, replicas, now):
            name = ReplicaName(model_id, step.ordinal)
            row = rows.get(name) or ModelServer(
                model_id=model_id, agent=self._name, ordinal=step.ordinal
            )
            if self._take(step, row, model, living.get(name), now):
                changed.append(row)
        if changed:
            ModelServer.objects.bulk_update(changed, _ROW_FIELDS)
        for name in names:
            self._ended.pop(name, None)
        for row in changed:
            if model is not None and row.state == ServerState.READY:
                _note_version(model, row.version, now)

    def _replica(
        self, name: ReplicaName, row: ModelServer | None, living: Living | None
    ) -> Replica:
        return Replica(
            ordinal=name.ordinal,
            record=Record() if row is None else _record(row),
            seen=None if living is None else _seen(living),
            ended=self._ended.get(name, ""),
            inherited=row is not None and row.boot_id != self._boot_id,
        )

    def _take(
        self,
        step: Step,
        row: ModelServer,
        model: ModelConfig | None,
        living: Living | None,
        now: datetime,
    ) -> bool:
        """Take one step and put its outcome into the row; say whether the row is to be written."""
        before = {name: getattr(row, name) for name in _ROW_FIELDS}
        state_before = row.state
        if step.act is Act.START and model is not None and (lack := self._devices.lack(model)):
            step = held_back(step, _record(row), lack)
        row.boot_id = self._boot_id
        _remember(row, step.record, step.reason)
        if living is not None:
            _take_note(row, living, now)
            if model is not None and row.pk is not None:
                self._utilisation.note(
                    row.key,
                    model_id=model.id,
                    pool_id=model.pool_id or "",
                    busy_s=row.busy_seconds,
                    now=now,
                )
        elif row.state not in LIVE:
            row.pid, row.address, row.queue_rows = None, "", 0
        if step.act is Act.STOP:
            self._backend.stop(ReplicaName(row.model_id, row.ordinal))
        if step.act is Act.START and model is not None:
            self._start(row, model, now)
        if row.state in {ServerState.BACKOFF, ServerState.FAILED} and row.state != state_before:
            row.last_error = row.reason
        if row.state != state_before:
            logger.info(
                "model_server %s/%s %s: %s", row.model_id, row.ordinal, row.state, row.reason
            )
        if row.pk is None:
            # A living server without model (it was just deleted) needs no row to be stopped.
            if model is not None:
                row.save()
            return False
        return any(getattr(row, name) != value for name, value in before.items())

    def _start(self, row: ModelServer, model: ModelConfig, now: datetime) -> None:
        row.starts += 1
        row.address, row.version, row.pid = "", "", None
        row.busy_seconds, row.rows_total, row.queue_rows, row.heartbeat_at = 0.0, 0, 0, None
        # Written first: should this agent die in the middle, the next one finds the row.
        row.save()
        try:
            # Judged again: links under the root may have changed since it was registered.
            found = checkpoints.find(model.checkpoint, root=self._checkpoint_root)
            name = ReplicaName(model.id, row.ordinal)
            self._backend.start(
                Launch(
                    name=name,
                    model_name=model.model_name,
                    checkpoint=found.argument,
                    options=model.serving,
                )
            )
            self._devices.take(name, model)
        except (LaunchFailed, CheckpointRefused) as failure:
            record, reason = launch_failed(_record(row), str(failure), now)
            _remember(row, record, reason)


def _desired(model: ModelConfig) -> Desired:
    return Desired(replicas=model.target_replicas, generation=model.restart_generation)


def _record(row: ModelServer) -> Record:
    return Record(
        state=ServerState(row.state),
        generation=row.generation,
        failures=row.failures,
        started_at=row.started_at,
        ready_at=row.ready_at,
        draining_at=row.draining_at,
        next_start_at=row.next_start_at,
    )


def _remember(row: ModelServer, record: Record, reason: str) -> None:
    row.state, row.generation, row.failures = record.state, record.generation, record.failures
    row.started_at, row.ready_at = record.started_at, record.ready_at
    row.draining_at, row.next_start_at = record.draining_at, record.next_start_at
    row.reason = reason


def _seen(living: Living) -> Seen:
    return Seen(
        answers=living.answers,
        ready=living.ready and bool(living.address),
        silent=timedelta(seconds=living.silent_s),
        idle=living.idle,
        stopping=living.stopping,
    )


def _take_note(row: ModelServer, living: Living, now: datetime) -> None:
    row.pid, row.address = living.pid, living.address
    row.version = living.version or row.version
    answered_at = now - timedelta(seconds=living.silent_s)
    if living.answers and answered_at - (row.heartbeat_at or _LONG_AGO) >= _HEARTBEAT_STEP:
        row.heartbeat_at = answered_at
    row.busy_seconds = living.stats.busy_seconds
    row.rows_total = living.stats.rows_total
    row.queue_rows = living.stats.queue_rows


def _note_version(model: ModelConfig, version: str, now: datetime) -> None:
    """What a replica serves counts, whatever was computed when the model was registered."""
    if not version or version == model.version:
        return
    ModelVersion.objects.get_or_create(
        model=model,
        version=version,
        defaults={"first_seen_at": now, "checkpoint": model.checkpoint},
    )
    ModelConfig.objects.filter(pk=model.pk).update(version=version)
    model.version = version
