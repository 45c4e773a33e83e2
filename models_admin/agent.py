"""The host agent's pass: what is wanted against what lives, brought together.

`run_once(now)` reads the wanted models, looks at the backend, asks `rollouts` how many replicas
each version of a model should have and `policy.reconcile` for one step a replica, takes it and
writes the rows. A row is written before its server starts, so that a server is never without one,
and a server is started with what the row of its version says, whatever the model's settings have
become. The loop around it is `manage.py host_models`.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from django.db import Error, connection

from models_admin import checkpoints, replica_rows, utilisation
from models_admin.devices import Devices
from models_admin.errors import CheckpointRefused
from models_admin.hosting import (
    Binding,
    DevicesHeld,
    Ending,
    HostingBackend,
    Launch,
    LaunchFailed,
    Living,
    ReplicaName,
    Verdict,
)
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    ModelKind,
    ModelServer,
    ModelVersion,
)
from models_admin.policy.assignment import assign
from models_admin.policy.reconcile import (
    Act,
    Desired,
    Step,
    drain_limit,
    held_back,
    launch_failed,
    reconcile,
)
from models_admin.policy.replicas import LIVE, Replica, ServerState
from models_admin.policy.rollout import Slot
from models_admin.rollouts import Rollouts

logger = logging.getLogger(__name__)

_LOCK = "models_admin.host_agent."
_TAIL_STEP: Final = timedelta(seconds=5)
"""A row gets what its server writes no more often."""
_CHECKS_ON: Final = Binding(env={"JAX_PLATFORMS": "cpu"})
_CHECK: Final = -1
"""Stands for the ordinal of a check run."""


class HostAgent:
    """One run of the agent of a machine; `boot_id` tells its rows from those of earlier runs."""

    def __init__(
        self, *, name: str, boot_id: UUID, backend: HostingBackend, checkpoint_root: Path
    ) -> None:
        self._name = name
        self._boot_id = boot_id
        self._backend = backend
        self._checkpoint_root = checkpoint_root
        self._ended: dict[ReplicaName, Ending] = {}
        self._tailed_at: dict[ReplicaName, datetime] = {}
        self._utilisation = utilisation.Sampler(name)
        self._devices = Devices()
        self._rollouts = Rollouts()
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
        pools = AcceleratorPool.objects.filter(agent=self._name)
        self._devices.look(seen.living.keys(), rows, models, pools)
        self._rollouts.read(models, now)
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
                    devices=[],
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
        desired = Desired(slots={})
        if model is not None:
            own = [rows[name] for name in names if name in rows]
            desired = self._desired(model, replicas, own, now)
        changed = []
        for step in reconcile(desired, replicas, now):
            name = ReplicaName(model_id, step.ordinal)
            row = rows.get(name) or ModelServer(
                model_id=model_id, agent=self._name, ordinal=step.ordinal
            )
            if self._take(step, row, model, living.get(name), now):
                changed.append(row)
        if changed:
            ModelServer.objects.bulk_update(changed, replica_rows.COLUMNS)
        for name in names:
            self._ended.pop(name, None)
        for row in changed:
            if model is not None and row.state == ServerState.READY and row.version:
                self._rollouts.found_out(row, now)

    def _desired(
        self,
        model: ModelConfig,
        replicas: Sequence[Replica],
        rows: Sequence[ModelServer],
        now: datetime,
    ) -> Desired:
        plan = self._rollouts.plan(model, replicas, rows, now)
        if plan.check is not None:
            self._rollouts.checked(plan.check, self._check(model, plan.check))
        counted = {replica.ordinal: self._rollouts.slot(replica, model) for replica in replicas}
        slots = assign(plan.wanted, replicas, counted)
        return Desired(slots=slots, drain_limit=drain_limit(model.timeout_s))

    def _check(self, model: ModelConfig, version: ModelVersion) -> Verdict | None:
        try:
            launch = self._launch(model, version, _CHECK, _CHECKS_ON)
        except CheckpointRefused as refusal:
            return Verdict(passed=False, text=f"{refusal.code}: {refusal.detail}")
        return self._backend.check(launch)

    def _replica(
        self, name: ReplicaName, row: ModelServer | None, living: Living | None
    ) -> Replica:
        return replica_rows.replica(
            name.ordinal,
            row,
            living,
            self._ended.get(name),
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
        before = {name: getattr(row, name) for name in replica_rows.FIELDS}
        name = ReplicaName(row.model_id, row.ordinal)
        binding = Binding()
        if step.act is Act.START and model is not None:
            found = self._devices.find(model)
            if isinstance(found, str):
                step = held_back(step, replica_rows.record(row), found)
            else:
                binding = found
        row.boot_id = self._boot_id
        replica_rows.remember(row, step.record, step.reason)
        if living is not None:
            replica_rows.take_note(row, living, now)
            self._note_use(row, model, now)
        else:
            replica_rows.clear(row)
        self._note_tail(name, row, living, now)
        if step.act is Act.STOP:
            self._backend.stop(name)
        if step.act is Act.START and model is not None and step.record.slot is not None:
            self._start(row, model, step.record.slot, binding, now)
        if row.state in {ServerState.BACKOFF, ServerState.FAILED} and row.state != before["state"]:
            row.last_error = row.reason
        if row.state != before["state"]:
            logger.info(
                "model_server %s/%s %s: %s", row.model_id, row.ordinal, row.state, row.reason
            )
        if row.pk is None:
            # A living server without model (it was just deleted) needs no row to be stopped.
            if model is not None:
                row.save()
            return False
        return any(getattr(row, name) != value for name, value in before.items())

    def _note_use(self, row: ModelServer, model: ModelConfig | None, now: datetime) -> None:
        if model is not None and row.pk is not None:
            run = utilisation.Run(
                key=row.key,
                model_id=model.id,
                pool_id=model.pool_id or "",
                ordinal=row.ordinal,
                host=row.host,
                version=row.version,
                # Without a pool nothing is bound.
                devices=len(row.devices) or 1,
            )
            self._utilisation.note(run, busy_s=row.busy_seconds, now=now)

    def _note_tail(
        self, name: ReplicaName, row: ModelServer, living: Living | None, now: datetime
    ) -> None:
        ended = self._ended.get(name)
        if ended is not None:
            row.log_tail = ended.log_tail or row.log_tail
        elif living is not None and living.log_tail not in ("", row.log_tail):
            written_at = self._tailed_at.get(name)
            if written_at is None or abs(now - written_at) >= _TAIL_STEP:
                row.log_tail, self._tailed_at[name] = living.log_tail, now

    def _start(
        self, row: ModelServer, model: ModelConfig, slot: Slot, binding: Binding, now: datetime
    ) -> None:
        before = replica_rows.record(row)
        replica_rows.reset(row)
        row.devices = list(binding.indices)
        # Written first: should this agent die in the middle, the next one finds the row.
        row.save()
        version = self._rollouts.version(model.pk, slot.version)
        try:
            launch = self._launch(model, version, row.ordinal, binding, slot)
            self._backend.start(launch)
            self._devices.take(launch.name, binding)
        except DevicesHeld as held:
            # Not a run: nothing was started.
            row.starts -= 1
            row.devices, row.state, row.reason = [], ServerState.STOPPED, str(held)
        except CheckpointRefused as refusal:
            text = f"{refusal.code}: {refusal.detail}"
            replica_rows.remember(row, *launch_failed(before, text, now, refused=True))
        except LaunchFailed as failure:
            replica_rows.remember(row, *launch_failed(before, str(failure), now))

    def _launch(
        self,
        model: ModelConfig,
        version: ModelVersion,
        ordinal: int,
        binding: Binding,
        slot: Slot | None = None,
    ) -> Launch:
        """Return what a version's servers are launched with; raises CheckpointRefused."""
        # Judged again: links under the root may have changed since it was registered.
        found = checkpoints.find(version.checkpoint, root=self._checkpoint_root)
        return Launch(
            name=ReplicaName(model.pk, ordinal),
            model_name=model.model_name,
            checkpoint=found.argument,
            loader=version.loader,
            options=version.serving,
            slot=slot,
            binding=binding,
        )
