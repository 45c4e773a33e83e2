"""How busy replicas were: sampled by their agent, read by the hour."""

from datetime import timedelta
from pathlib import Path

import pytest
from django.db import OperationalError
from pytest_django import Settings

from models_admin import utilisation
from models_admin.models import AcceleratorPool, ModelConfig, ReplicaSample, UtilizationSample
from models_admin.policy.replicas import ServerState
from models_admin.utilisation import PERIOD, Run, Sampler, Slots, Use
from tests.builders import NOW
from tests.hosted_machine import machine, register

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)


def see(
    sampler: Sampler,
    replica: str,
    busy_s: float,
    after: timedelta,
    model: str = "m",
    *,
    ordinal: int = 0,
    devices: int = 1,
    version: str = "v1",
) -> None:
    run = Run(
        key=replica, model_id=model, pool_id="cpu", ordinal=ordinal, host="here", version=version,
        devices=devices,
    )  # fmt: skip
    sampler.note(run, busy_s=busy_s, now=NOW + after)


def samples() -> list[tuple[float, str, int, float, float]]:
    """Return seconds after NOW, model, replicas, busy seconds and replica-seconds."""
    rows = UtilizationSample.objects.order_by("at", "model_id")
    return [
        ((row.at - NOW).total_seconds(), row.model_id, row.replicas, row.busy_s, row.replica_s)
        for row in rows
    ]


def of_replicas() -> list[tuple[float, int, str, int, float, float]]:
    """Return seconds after NOW, ordinal, version, devices, busy seconds and seconds lived."""
    rows = ReplicaSample.objects.order_by("at", "ordinal", "pk")
    return [
        (
            (row.at - NOW).total_seconds(),
            row.ordinal,
            row.version,
            row.devices,
            round(row.busy_s, 6),
            row.lived_s,
        )
        for row in rows
    ]


def test_replicas_of_a_model_are_summed_up_each_period() -> None:
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    see(sampler, "a", 0.0, timedelta(0))
    for s in range(1, 31):
        see(sampler, "a", 0.9 * s, s * SECOND)
        if s >= 10:
            see(sampler, "b", 0.5 * (s - 10), s * SECOND)
        see(sampler, "c", 0.0, s * SECOND, model="idle")
        sampler.store_if_due(NOW + s * SECOND)

    assert samples() == [
        (30.0, "idle", 1, 0.0, 29.0),
        (30.0, "m", 2, pytest.approx(0.9 * 30 + 0.5 * 20), 50.0),
    ]


def test_the_next_sample_has_only_what_came_since() -> None:
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    see(sampler, "a", 3.0, timedelta(0))
    for n in (1, 2):
        see(sampler, "a", 3.0 + 10 * n, n * PERIOD)
        sampler.store_if_due(NOW + n * PERIOD)

    # What it had computed before it was first seen is counted, too.
    assert [(busy_s, replica_s) for *_, busy_s, replica_s in samples()] == [
        (13.0, 30.0),
        (10.0, 30.0),
    ]


def test_a_run_that_follows_another_begins_at_nothing() -> None:
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    see(sampler, "ms-1-1", 0.0, timedelta(0))
    see(sampler, "ms-1-1", 8.0, 10 * SECOND)
    see(sampler, "ms-1-2", 0.0, 15 * SECOND)
    see(sampler, "ms-1-2", 5.0, 30 * SECOND)
    sampler.store_if_due(NOW + PERIOD)

    assert samples() == [(30.0, "m", 2, 13.0, 25.0)]
    # A row for each run, or the seconds of one would count for the version of the other.
    assert of_replicas() == [(30.0, 0, "v1", 1, 8.0, 10.0), (30.0, 0, "v1", 1, 5.0, 15.0)]


def test_each_replica_has_its_own_samples_until_it_ends() -> None:
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    for s in range(0, 61, 10):
        see(sampler, "ms-1-1", 0.9 * s, s * SECOND, version="v1" if s else "")
        if s <= 40:
            see(sampler, "ms-2-1", 0.1 * s, s * SECOND, ordinal=1, version="v2")
        sampler.store_if_due(NOW + s * SECOND)

    assert of_replicas() == [
        (30.0, 0, "v1", 1, 27.0, 30.0),
        (30.0, 1, "v2", 1, 3.0, 30.0),
        (60.0, 0, "v1", 1, 27.0, 30.0),
        # It ended between the samples.
        (60.0, 1, "v2", 1, 1.0, 10.0),
    ]
    assert {row.host for row in ReplicaSample.objects.all()} == {"here"}


def test_an_agent_that_starts_again_counts_only_what_its_own_servers_do() -> None:
    before = Sampler("local")
    before.store_if_due(NOW)
    see(before, "ms-1-1", 0.0, timedelta(0))
    see(before, "ms-1-1", 20.0, 30 * SECOND)
    before.store_if_due(NOW + PERIOD)
    see(before, "ms-1-1", 25.0, 40 * SECOND)

    after = Sampler("local")
    after.store_if_due(NOW + 50 * SECOND)
    see(after, "ms-1-2", 0.0, 50 * SECOND)
    see(after, "ms-1-2", 6.0, 80 * SECOND)
    after.store_if_due(NOW + 80 * SECOND)

    # The ten seconds that the first one had not stored are lost; none counts twice.
    assert [row[1:] for row in samples()] == [("m", 1, 20.0, 30.0), ("m", 1, 6.0, 30.0)]
    assert [row[-2:] for row in of_replicas()] == [(20.0, 30.0), (6.0, 30.0)]


def test_a_sample_is_of_model_and_replicas_or_not_at_all_and_never_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    see(sampler, "ms-1-1", 0.0, timedelta(0))
    see(sampler, "ms-1-1", 20.0, 30 * SECOND)

    def fail(*args: object) -> None:
        raise OperationalError

    with monkeypatch.context() as patch:
        patch.setattr(ReplicaSample.objects, "bulk_create", fail)
        with pytest.raises(OperationalError):
            sampler.store_if_due(NOW + PERIOD)
    assert samples() == []
    assert of_replicas() == []
    see(sampler, "ms-1-1", 21.0, 60 * SECOND)
    sampler.store_if_due(NOW + 2 * PERIOD)

    assert samples() == [(60.0, "m", 1, 1.0, 30.0)]
    assert of_replicas() == [(60.0, 0, "v1", 1, 1.0, 30.0)]


def test_replicas_with_more_devices_than_others_of_their_model_are_told_apart() -> None:
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    for s in (0, 30):
        see(sampler, "ms-1-1", float(s), s * SECOND, devices=4)
        see(sampler, "ms-2-1", 0.0, s * SECOND, ordinal=1)
    sampler.store_if_due(NOW + PERIOD)

    found = UtilizationSample.objects.order_by("devices")
    assert [(row.devices, row.busy_s) for row in found] == [(1, 0.0), (4, 30.0)]
    # Four devices were busy, and one was not.
    spans = [timedelta(hours=1)]
    assert utilisation.duty(spans, now=NOW + PERIOD, pool_id="cpu") == [0.8]


def test_a_clock_that_is_set_back_makes_no_negative_time() -> None:
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    see(sampler, "a", 0.0, 20 * SECOND)
    see(sampler, "a", 1.0, timedelta(0))
    sampler.store_if_due(NOW - timedelta(hours=1))

    assert samples() == [(-3600.0, "m", 1, 1.0, 0.0)]


def test_an_agent_says_of_each_replica_where_it_ran_and_what_it_held(tmp_path: Path) -> None:
    AcceleratorPool.objects.create(id="box", devices=2)
    with machine(tmp_path) as host:
        register(pool="box", devices_per_replica=2)
        (row,) = host.until_state(ServerState.READY)
        host.clock.jump(seconds=30)
        host.step()

    sample = ReplicaSample.objects.get()
    assert (sample.model_id, sample.pool_id, sample.ordinal) == ("mini", "box", 0)
    assert (sample.host, sample.version, sample.devices) == (row.host, "stub-0", 2)
    # The stub says that it was busy for 1.5 s.
    assert sample.busy_s == 1.5
    assert sample.lived_s == pytest.approx(30, abs=10)
    assert UtilizationSample.objects.get().devices == 2


def test_old_samples_of_the_agent_are_erased(settings: Settings) -> None:
    old = NOW - settings.AIRS_KEEP_QUEUE_SAMPLES
    for agent in ("local", "other"):
        UtilizationSample.objects.create(
            at=old, agent=agent, model_id="m", replicas=1, busy_s=1, replica_s=1
        )
        ReplicaSample.objects.create(
            at=old, agent=agent, model_id="m", ordinal=0, busy_s=1, lived_s=1
        )
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    sampler.store_if_due(NOW + PERIOD)

    for table in (UtilizationSample, ReplicaSample):
        assert [row.agent for row in table.objects.all()] == ["other"]


def test_use_is_read_by_hour_and_model() -> None:
    for minutes, model, busy_s in ((1, "m", 3.0), (2, "m", 4.0), (2, "n", 1.0), (61, "m", 5.0)):
        UtilizationSample.objects.create(
            at=NOW + timedelta(minutes=minutes), agent="local", model_id=model, replicas=1,
            busy_s=busy_s, replica_s=10.0,
        )  # fmt: skip

    assert utilisation.hours(NOW, NOW + timedelta(hours=2)) == [
        Use(hour_at=NOW, model_id="m", busy_s=7.0, replica_s=20.0),
        Use(hour_at=NOW, model_id="n", busy_s=1.0, replica_s=10.0),
        Use(hour_at=NOW + timedelta(hours=1), model_id="m", busy_s=5.0, replica_s=10.0),
    ]
    assert utilisation.hours(NOW, NOW + timedelta(minutes=1))[0].busy_s == 3.0
    assert utilisation.hours(NOW + timedelta(minutes=61), NOW + timedelta(hours=2)) == []


def test_slots_are_replicas_or_calls() -> None:
    AcceleratorPool.objects.create(id="pool", devices=8)
    ModelConfig.objects.create(
        id="own", kind="hosted", model_name="own", pool_id="pool", loader="l", checkpoint="c",
        replicas_default=3, replicas_max=5, created_at=NOW, updated_at=NOW,
    )  # fmt: skip
    ModelConfig.objects.create(
        id="theirs", kind="external", model_name="x", url="http://x", max_concurrency=7,
        created_at=NOW, updated_at=NOW,
    )  # fmt: skip

    assert utilisation.slots() == {
        "own": Slots(hosted=True, count=3),
        "theirs": Slots(hosted=False, count=7),
    }


def test_the_duty_cycle_of_a_model_and_of_a_pool_is_known_for_spans_up_to_now() -> None:
    day, hour = timedelta(days=1), timedelta(hours=1)
    for ago, model, pool, busy_s in (
        (timedelta(0), "m", "p", 9.0),
        (hour, "m", "p", 3.0),
        (hour, "n", "p", 0.0),
        (day, "m", "p", 10.0),
        (-SECOND, "m", "p", 10.0),
        (hour, "other", "q", 10.0),
        (timedelta(0), "late", "q", 10.5),
    ):
        UtilizationSample.objects.create(
            at=NOW - ago, agent="local", model_id=model, pool_id=pool, replicas=1, busy_s=busy_s,
            replica_s=10.0,
        )  # fmt: skip

    def duty(**of: str) -> list[float | None]:
        return utilisation.duty([hour, day], now=NOW, **of)

    assert duty(model_id="m") == [0.9, 0.6]
    assert duty(model_id="n") == [None, 0.0]
    assert duty(pool_id="p") == [0.9, 0.4]
    assert duty(model_id="late") == [1.0, 1.0]
    assert duty(model_id="nobody") == [None, None]
