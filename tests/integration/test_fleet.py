"""What a rater can do: with the replicas that serve or start, not with those it might get."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest

from fulfillment import ready
from fulfillment.clock import database_now
from fulfillment.fleet import Fleet
from fulfillment.held import Held
from fulfillment.management.commands.dispatch import Glance
from fulfillment.model_directory import LastKnown
from fulfillment.models import Rater, RaterCost
from fulfillment.policy import traffic
from fulfillment.policy.priority import PriorityClass
from fulfillment.windows import Windows
from tests.builders import MODEL, NOW
from tests.rating_queue import Fleet as Live
from tests.rating_queue import Queue, Replica, batches, boot, rater, submit

pytestmark = pytest.mark.django_db

SECONDS = 0.5
"""Of a replica, for a request."""


@dataclass(kw_only=True, slots=True)
class Directory(Live):
    """A directory that knows what starts, and what a model could have."""

    starting: list[tuple[str, str]] = field(default_factory=list)
    away: bool = False

    def coming(self, now: datetime) -> Sequence[tuple[str, str]]:
        if self.away:
            raise ConnectionError("no model management")
        return list(self.starting)

    def reachable(self, model_id: str, version: str, now: datetime) -> float:
        return 100.0


def measured(of: Rater) -> None:
    RaterCost.objects.create(
        rater=of,
        seconds_a_request=SECONDS,
        call_seconds_a_request=SECONDS,
        requests=1_000,
        exact=True,
        measured_at=NOW,
        read_to=NOW,
        servers=100.0,
        looked_at=NOW,
    )


def pace(directory: Live, *, windows: Windows | None = None, resting: Sequence[str] = ()) -> float:
    """Return the requests a second of the only rater that has work, 0 where it is not known."""
    now = database_now()
    (version,) = ready.read(now)
    fleet = Fleet(directory, resting=resting, held=Held(), now=now)
    room = fleet.room(version, windows or Windows())
    return fleet.requests_per_s(version, room) or 0.0


def test_replicas_that_serve_and_those_that_start_count() -> None:
    submit(["a"])
    directory = Directory(
        live=[Replica(key="r1"), Replica(key="r2"), Replica(key="r3", version="v2")],
        starting=[(MODEL, ""), (MODEL, "v1"), (MODEL, "v2"), ("other", "")],
    )
    assert pace(directory) == 0.0

    measured(Rater.objects.get())

    assert pace(directory) == 4 / SECONDS
    assert pace(directory, resting=["r2"]) == 3 / SECONDS
    assert pace(Directory()) == 0.0
    assert pace(Live(live=[Replica()])) == 1 / SECONDS


def test_of_an_external_model_the_calls_that_it_may_hold_now_count() -> None:
    submit(["a"])
    measured(Rater.objects.get())
    windows = Windows()
    directory = Live(live=[Replica(key="ext", managed=False, window=8)])
    assert pace(directory, windows=windows) == 8 / SECONDS

    signal = traffic.Signal(priority_class=PriorityClass.HIGH, overloaded=1)
    windows.open["ext"] = traffic.adapt(windows.open["ext"], [signal], NOW)

    assert pace(directory, windows=windows) == pytest.approx(0.7 * 8 / SECONDS)


@pytest.mark.parametrize(("protocol", "requests_per_s"), [("oip", 36.0), ("openai", 3.0)])
def test_a_limit_of_calls_a_second_bounds_it(protocol: str, requests_per_s: float) -> None:
    submit(["a"], of=rater(max_qps=3.0), batch_size=12)
    measured(Rater.objects.get())

    found = pace(Live(live=[Replica(key=f"r{n}", protocol=protocol) for n in range(40)]))

    assert found == pytest.approx(requests_per_s)


def test_what_starts_is_known_as_it_was_when_model_management_was_last_there() -> None:
    directory = Directory(live=[Replica()], starting=[(MODEL, "")])
    known = LastKnown(directory)
    glance = Glance(known)
    known.replicas(NOW)

    directory.away = True
    known.replicas(NOW)

    assert glance.coming(NOW) == [(MODEL, "")]


@pytest.mark.parametrize(("starting", "is_large"), [(0, True), (3, False)])
def test_no_deadline_presses_that_replicas_which_start_will_keep(
    starting: int, is_large: bool
) -> None:
    boot()
    large = submit(
        [f"n{n}" for n in range(100)], batch_size=10, owner="ann",
        deadline_in=timedelta(seconds=50),
    )  # fmt: skip
    submit(["small"], batch_size=10, owner="bob", deadline_in=timedelta(hours=9))
    measured(Rater.objects.get())
    directory = Directory(live=[Replica(window=1)], starting=[(MODEL, "")] * starting)
    dispatcher = Queue(fleet=directory)

    dispatcher.run()

    (batch_id,) = dispatcher.take_sent()[0].ids
    assert (batch_id in {batch.pk for batch in batches(large)}) is is_large
