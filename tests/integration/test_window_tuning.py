"""A hosted model's window follows what its replicas do while it is full, and nothing else."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from pytest_django import Settings

from fulfillment import model_demand
from models_admin import services, window_tuning
from models_admin.directory import directory
from models_admin.models import AcceleratorPool, ModelConfig, ModelServer, TunedWindow, window_of
from models_admin.policy.replicas import ServerState
from tests import builders, demand_source
from tests.demand_source import HELD, SOURCE, Work
from tests.rating_queue import Replica, boot, queue, submit

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def _signals(settings: Settings) -> Iterator[None]:
    settings.AIRS_DEMAND = demand_source.NAME
    settings.AIRS_HELD = demand_source.HELD_NAME
    yield
    SOURCE.reset()
    HELD.clear()


class Scene:
    """A model of two replicas that always have more to do than their windows let through."""

    def __init__(self, **changes: Any) -> None:
        services.register_pool(AcceleratorPool(id="box", devices=2))
        services.register_model(
            "mini",
            now=NOW,
            kind="hosted",
            checkpoint="tiny:0",
            pool="box",
            replicas_max=2,
            **changes,
        )
        ModelConfig.objects.update(started=True, wanted_replicas=2)
        self.now = NOW
        self.pace = 10_000
        self.model = ModelConfig.objects.get()
        self.servers = [self._server(ordinal) for ordinal in range(2)]
        SOURCE.works = [Work(model_id="mini", other_s=3600.0)]

    def _server(self, ordinal: int) -> ModelServer:
        return ModelServer.objects.create(
            model=self.model,
            agent="local",
            ordinal=ordinal,
            state=ServerState.READY,
            address="http://x",
            version=self.model.version,
            started_at=NOW,
            ready_at=NOW,
            heartbeat_at=NOW,
        )

    def minute(self, busy: float = 1.0, *, held: float = 1.0) -> int:
        """Let a minute pass, of which replicas were busy so much; look."""
        self.now += MINUTE
        for server in self.servers:
            server.busy_seconds += busy * 60
            server.tokens_total += round(busy * 60 * self.pace)
            server.heartbeat_at = self.now
            server.save()
            HELD[server.key] = round(held * self.window)
        return window_tuning.run_once(self.now)

    @property
    def window(self) -> int:
        return window_of(ModelConfig.objects.select_related("tuned_window").get())

    def windows(self) -> list[int]:
        return [replica.window for replica in directory.replicas(self.now)]


def test_a_window_shrinks_while_replicas_stay_busy_and_grows_back_where_they_do_not() -> None:
    scene = Scene()
    had = []
    for _ in range(12):
        scene.minute(1.0 if scene.window >= 3 else 0.8)
        had.append(scene.window)

    assert had == [16, 12, 8, 6, 4, 3, 2, 3, 3, 3, 3, 3]
    assert scene.windows() == [3, 3]
    row = TunedWindow.objects.get()
    assert row.reason == (
        "with 3 busy 100%, 10,000 tokens a busy second; "
        "with 2 busy 80%, 10,000 tokens a busy second"
    )
    assert set(row.measures) == {"16", "12", "8", "6", "4", "3", "2"}


def test_a_window_that_is_too_small_grows() -> None:
    scene = Scene(window=2)
    for _ in range(8):
        scene.minute(min(1.0, scene.window / 6))

    assert scene.window == 6


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda: setattr(SOURCE, "works", []), id="nothing to do"),
        pytest.param(
            lambda: setattr(SOURCE, "works", [Work(model_id="mini", other_s=100.0)]), id="little"
        ),
        pytest.param(lambda: setattr(SOURCE, "failure", ValueError()), id="nobody tells"),
        pytest.param(lambda: setattr(SOURCE, "age", timedelta(minutes=5)), id="told long ago"),
    ],
)
def test_without_work_all_along_nothing_is_measured(spoil: Any) -> None:
    scene = Scene()
    scene.minute()
    spoil()

    assert scene.minute(0.1) == 0
    assert scene.window == 16
    # What was seen before counts no more, either.
    SOURCE.reset()
    SOURCE.works = [Work(model_id="mini", other_s=3600.0)]
    scene.now += 3 * MINUTE
    assert scene.minute(0.1) == 0
    assert scene.minute(0.1) == 1


def test_where_windows_were_not_full_something_else_holds_replicas_up() -> None:
    scene = Scene()
    scene.minute()
    assert scene.minute(0.1, held=0.25) == 0
    assert scene.minute(0.1) == 0
    assert scene.minute(0.1) == 1


def test_where_nobody_says_what_is_out_windows_stay(settings: Settings) -> None:
    settings.AIRS_HELD = ""
    scene = Scene()
    scene.minute()
    scene.minute()
    assert not TunedWindow.objects.exists()

    settings.AIRS_HELD = "tests.demand_source.missing"
    assert scene.minute() == 0


def test_a_tick_that_comes_twice_counts_once() -> None:
    scene = Scene()
    scene.minute()
    scene.minute()
    assert scene.window == 12
    assert window_tuning.run_once(scene.now + timedelta(seconds=2)) == 0
    assert scene.window == 12


def test_a_replica_that_was_started_meanwhile_says_nothing() -> None:
    scene = Scene()
    scene.minute()
    scene.servers[0].starts += 1
    scene.servers[0].busy_seconds = 0.0
    scene.servers[1].busy_seconds -= 30.0

    assert scene.minute(1.0) == 1
    assert TunedWindow.objects.get().measures["16"][0] == 0.5


def test_the_operator_s_figure_holds_at_once() -> None:
    scene = Scene()
    for _ in range(4):
        scene.minute()
    assert scene.window == 6

    services.update_model("mini", now=scene.now, window=10)
    assert scene.windows() == [10, 10]
    scene.minute()
    scene.minute()
    assert scene.window == 8, "it begins there anew"

    services.update_model("mini", now=scene.now, tunes_window=False)
    assert scene.windows() == [10, 10]
    assert scene.minute() == 0


def test_another_version_begins_anew() -> None:
    scene = Scene()
    for _ in range(3):
        scene.minute()
    ModelConfig.objects.update(version="another")

    assert scene.window == 16
    scene.minute()
    assert TunedWindow.objects.get().version == "another"
    assert scene.window == 16


def test_replicas_of_another_version_say_nothing() -> None:
    """An old version has a replica as long as work waits for it, hours perhaps."""
    scene = Scene()
    scene.servers[1].version = "old"
    SOURCE.works = [Work(model_id="mini", version=scene.model.version, other_s=3600.0)]
    scene.minute()
    scene.servers[1].busy_seconds -= 60.0

    assert scene.minute() == 1
    assert TunedWindow.objects.get().measures["16"][0] == 1.0

    SOURCE.works = [Work(model_id="mini", version="old", other_s=3600.0)]
    scene.minute()
    assert scene.minute() == 0


@pytest.mark.parametrize(
    ("queue_rows", "serving", "window"),
    [
        (600, {}, 24),
        (1_100, {}, 12),
        (1_100, {"max_queue": 10_000}, 24),
        (600, {"headroom": 1_500}, 12),
        (0, {}, 24),
    ],
)
def test_no_window_is_tried_with_which_servers_would_refuse(
    queue_rows: int, serving: dict[str, int], window: int
) -> None:
    scene = Scene(serving=serving)
    scene.servers[0].queue_rows = queue_rows
    scene.minute(0.5)
    scene.minute(0.5)

    assert scene.window == window


def test_a_stopped_model_is_left_alone() -> None:
    scene = Scene()
    scene.minute()
    ModelConfig.objects.update(started=False)
    assert scene.minute(0.1) == 0


def test_it_is_shown(client: Client) -> None:
    scene = Scene()
    scene.minute()
    scene.minute()
    headers = {"Authorization": f"Bearer {builders.token()}"}

    shown = client.get("/api/v1/models/mini", headers=headers).json()

    assert (shown["window"], shown["tunes_window"], shown["window_now"]) == (16, True, 12)
    assert shown["window_reason"] == ("with 16 busy 100%, 10,000 tokens a busy second; 12 is tried")


def test_what_is_out_is_counted_by_replica() -> None:
    boot()
    submit([f"n{number}" for number in range(10)], batch_size=2)
    assert model_demand.held(NOW) == {}

    queue(Replica(window=3)).run()

    assert model_demand.held(NOW) == {"r1": 3}
