"""How busy replicas were: sampled by their agent, read by the hour."""

from datetime import timedelta

import pytest
from pytest_django import Settings

from models_admin import utilisation
from models_admin.models import AcceleratorPool, ModelConfig, UtilizationSample
from models_admin.utilisation import PERIOD, Sampler, Slots, Use
from tests.builders import NOW

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)


def see(sampler: Sampler, replica: str, busy_s: float, after: timedelta, model: str = "m") -> None:
    sampler.note(replica, model_id=model, pool_id="cpu", busy_s=busy_s, now=NOW + after)


def samples() -> list[tuple[float, str, int, float, float]]:
    """Return seconds after NOW, model, replicas, busy seconds and replica-seconds."""
    rows = UtilizationSample.objects.order_by("at", "model_id")
    return [
        ((row.at - NOW).total_seconds(), row.model_id, row.replicas, row.busy_s, row.replica_s)
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


def test_a_clock_that_is_set_back_makes_no_negative_time() -> None:
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    see(sampler, "a", 0.0, 20 * SECOND)
    see(sampler, "a", 1.0, timedelta(0))
    sampler.store_if_due(NOW - timedelta(hours=1))

    assert samples() == [(-3600.0, "m", 1, 1.0, 0.0)]


def test_old_samples_of_the_agent_are_erased(settings: Settings) -> None:
    old = NOW - settings.AIRS_KEEP_QUEUE_SAMPLES
    for agent in ("local", "other"):
        UtilizationSample.objects.create(
            at=old, agent=agent, model_id="m", replicas=1, busy_s=1, replica_s=1
        )
    sampler = Sampler("local")
    sampler.store_if_due(NOW)
    sampler.store_if_due(NOW + PERIOD)

    assert [row.agent for row in UtilizationSample.objects.all()] == ["other"]


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
    assert duty(model_id="nobody") == [None, None]
