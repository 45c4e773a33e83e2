"""Bringing versions about: what the policy decides of each model, read, written and remembered.

`Rollouts` belongs to one host agent. Rows of versions are written under the locks of the model and
its pool, so that replicas of an old and a new version together never want more devices than the
pool has left; what `services.devices_used` counts includes them.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db import transaction

from models_admin import demand, versions
from models_admin.hosting import Verdict
from models_admin.models import AcceleratorPool, ModelConfig, ModelServer, ModelVersion
from models_admin.policy.replicas import Replica, ServerState
from models_admin.policy.rollout import (
    Check,
    Fleet,
    Rollout,
    Run,
    Slot,
    VersionState,
    rollout,
)
from models_admin.services import devices_used

logger = logging.getLogger(__name__)

GIVES_UP_AFTER: Final = 5
"""Deaths in a row after which a version that never served counts as one that cannot be loaded."""

_BACKLOG_EVERY: Final = timedelta(seconds=5)
_FIELDS: Final = ("state", "reason", "changed_at", "replicas", "generation")
_Values = tuple[str, str, int, int]
"""Those of a version's row, but for the time."""
_COUNTED: Final = frozenset(
    {
        ServerState.STARTING,
        ServerState.WARMING,
        ServerState.READY,
        ServerState.BACKOFF,
        ServerState.FAILED,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a pass is to bring about for a model."""

    wanted: Mapping[Slot, int]
    check: ModelVersion | None


class Rollouts:
    """The versions of an agent's models; remembers check runs and, for seconds, backlogs."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[int, ModelVersion]] = {}
        self._stored: dict[int, _Values] = {}
        self._backlog: Mapping[tuple[str, str], int] | None = {}
        self._asked_at: datetime | None = None
        self._checks: dict[int, tuple[datetime | None, Verdict | None]] = {}

    def read(self, models: Mapping[str, ModelConfig], now: datetime) -> None:
        """Read the versions of all models, and what work is left for them."""
        found: dict[str, list[ModelVersion]] = {model_id: [] for model_id in models}
        for row in ModelVersion.objects.filter(model__in=models):
            found[row.model_id].append(row)
        self._versions, self._stored = {}, {}
        for model_id, rows in found.items():
            self._keep(model_id, rows)
        several = any(len(rows) > 1 for rows in found.values())
        if several and (self._asked_at is None or abs(now - self._asked_at) >= _BACKLOG_EVERY):
            self._ask(now)

    def version(self, model_id: str, pk: int) -> ModelVersion:
        """Return a version of a model."""
        return self._versions[model_id][pk]

    def slot(self, replica: Replica, model: ModelConfig) -> Slot | None:
        """Return what a replica counts as: restarts are no matter to a version that is replaced."""
        if replica.slot is None:
            return None
        row = self._versions[model.pk].get(replica.slot.version)
        current = self._asked(model)
        if row is None or (current is not None and row.pk == current.pk):
            return replica.slot
        return Slot(row.pk, row.generation)

    def checked(self, version: ModelVersion, verdict: Verdict | None) -> None:
        """Remember what a check run came to; None while it runs."""
        self._checks[version.pk] = version.changed_at, verdict

    def found_out(self, server: ModelServer, now: datetime) -> None:
        """Take note of a version that a server turned out to serve."""
        launched = self._versions[server.model_id].get(server.launched_id or 0)
        if launched is not None and launched.version != server.version:
            with transaction.atomic():
                ModelConfig.objects.select_for_update().get(pk=server.model_id)
                versions.found_out(launched, server.version, now)

    def plan(
        self,
        model: ModelConfig,
        replicas: Iterable[Replica],
        servers: Iterable[ModelServer],
        now: datetime,
    ) -> Plan:
        """Decide for a model, and write what is new."""
        found = list(replicas)
        failures = _failures(servers)
        current = self._asked(model)
        decided = None
        if current is not None and current.state:
            decided = self._decide(model, current, found, failures)
        if decided is None or self._is_news(model, decided):
            if len(self._versions[model.pk]) > 1 and self._asked_at != now:
                # What came in the last seconds must not see its version go.
                self._ask(now)
            with transaction.atomic():
                locked = _locked(model)
                self._keep(model.pk, ModelVersion.objects.filter(model=model))
                current = self._asked(locked)
                if current is None or not current.state:
                    # Settings that were changed behind the services' back are a candidate, too.
                    current = versions.propose(locked, "", now)
                    self._keep(model.pk, ModelVersion.objects.filter(model=model))
                    current = self._versions[model.pk][current.pk]
                decided = self._decide(locked, current, found, failures)
                self._write(locked, current, decided, now)
        rows = self._versions[model.pk]
        return Plan(
            wanted={wish.slot: wish.replicas for wish in decided.wishes if wish.replicas},
            check=None if decided.check is None else rows[decided.check.version],
        )

    def _ask(self, now: datetime) -> None:
        self._backlog, self._asked_at = demand.backlog(now), now

    def _keep(self, model_id: str, rows: Iterable[ModelVersion]) -> None:
        self._versions[model_id] = {row.pk: row for row in rows}
        self._stored |= {row.pk: _values(row) for row in self._versions[model_id].values()}

    def _asked(self, model: ModelConfig) -> ModelVersion | None:
        return versions.asked(model, self._versions[model.pk].values())

    def _spare(self, model: ModelConfig) -> int:
        """Return the further replicas that nobody else wants the devices of."""
        if model.pool is None:
            return 1
        others = devices_used(model.pool.pk, without=model.pk)
        left = model.pool.devices - others - model.target_replicas * model.devices_per_replica
        return max(0, left // model.devices_per_replica)

    def _decide(
        self,
        model: ModelConfig,
        current: ModelVersion,
        replicas: Sequence[Replica],
        failures: Mapping[int, str],
    ) -> Rollout:
        if current.generation != model.restart_generation:
            current.generation = model.restart_generation
            if current.state == VersionState.FAILED:
                # A restart is another chance.
                current.state, current.changed_at = VersionState.CANDIDATE, None
                failures = {pk: why for pk, why in failures.items() if pk != current.pk}
        rows = self._versions[model.pk]
        own = [(self.slot(replica, model), replica) for replica in replicas]
        slots = {Slot(row.pk, row.generation) for row in rows.values()}
        slots |= {slot for slot, _ in own if slot is not None and slot.version in rows}
        runs = [
            self._run(model, slot, [replica for of, replica in own if of == slot], failures)
            for slot in sorted(slots)
        ]
        asked = Slot(current.pk, current.generation)
        is_alone = not any(_matters(run) for run in runs if run.slot != asked)
        spare = 0 if is_alone else self._spare(model)
        return rollout(Fleet(wanted=model.target_replicas, asked=asked, runs=runs, spare=spare))

    def _run(
        self,
        model: ModelConfig,
        slot: Slot,
        replicas: Sequence[Replica],
        failures: Mapping[int, str],
    ) -> Run:
        row = self._versions[model.pk][slot.version]
        # What was asked for again since is to be checked again.
        asked_at, verdict = self._checks.get(row.pk, (None, None))
        check = Check.NONE
        if verdict is not None and asked_at == row.changed_at:
            check = Check.PASSED if verdict.passed else Check.FAILED
        backlog = None
        if self._backlog is not None:
            backlog = self._backlog.get((model.pk, row.version), 0)
        return Run(
            slot=slot,
            name=row.version,
            state=VersionState(row.state or VersionState.RETIRED),
            has=sum(replica.record.state in _COUNTED for replica in replicas),
            ready=sum(map(_serves, replicas)),
            failing=failures.get(row.pk, ""),
            backlog=backlog,
            check=check,
            check_text="" if verdict is None else verdict.text,
            is_withdrawn=row.is_withdrawn,
        )

    def _is_news(self, model: ModelConfig, decided: Rollout) -> bool:
        return any(self._stored[row.pk] != values for row, values in self._outcomes(model, decided))

    def _outcomes(
        self, model: ModelConfig, decided: Rollout
    ) -> Iterable[tuple[ModelVersion, _Values]]:
        """Return what the rows of a model's versions are to hold."""
        replicas: dict[int, int] = defaultdict(int)
        for wish in decided.wishes:
            replicas[wish.slot.version] += wish.replicas
        of_slots = {wish.slot: wish for wish in decided.wishes}
        for row in self._versions[model.pk].values():
            wish = of_slots[Slot(row.pk, row.generation)]
            state = wish.state if row.state else ""
            yield row, (state, wish.reason or row.reason, replicas[row.pk], row.generation)

    def _write(
        self, model: ModelConfig, current: ModelVersion, decided: Rollout, now: datetime
    ) -> None:
        changed = []
        for row, values in self._outcomes(model, decided):
            stored = self._stored[row.pk]
            if stored == values:
                continue
            row.state, row.reason, row.replicas, row.generation = values
            if row.state != stored[0]:
                row.changed_at = now
                logger.info(
                    "model_version %s %s: %s", row, row.state, row.reason or "no reason is known"
                )
            self._stored[row.pk] = values
            changed.append(row)
        ModelVersion.objects.bulk_update(changed, _FIELDS)
        if current.state == VersionState.SERVING and current.version not in ("", model.version):
            # From now on new work is pinned to it.
            ModelConfig.objects.filter(pk=model.pk).update(version=current.version)


def _locked(model: ModelConfig) -> ModelConfig:
    """Return a model and its pool as they are now, held until the transaction ends."""
    locked = ModelConfig.objects.select_for_update().get(pk=model.pk)
    if locked.pool_id is not None:
        locked.pool = AcceleratorPool.objects.select_for_update().get(pk=locked.pool_id)
    return locked


def _values(row: ModelVersion) -> _Values:
    return row.state, row.reason, row.replicas, row.generation


def _matters(run: Run) -> bool:
    """Say whether a run that is not asked for may have a replica."""
    return bool(run.has or run.backlog) or run.state not in (
        VersionState.RETIRED,
        VersionState.FAILED,
    )


def _serves(replica: Replica) -> bool:
    return (
        replica.seen is not None
        and replica.seen.ready
        and not replica.seen.stopping
        and replica.record.state is ServerState.READY
    )


def _failures(servers: Iterable[ModelServer]) -> dict[int, str]:
    """Return why replicas of versions have given up, by version."""
    return {
        server.launched_id: server.last_error
        for server in servers
        if server.launched_id is not None
        and (server.state == ServerState.FAILED or server.failures >= GIVES_UP_AFTER)
    }
