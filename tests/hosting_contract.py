"""What the host agent relies on, of any hosting backend: a suite to be run on each.

A backend's test derives from `HostingContract` and says how to make one, and how to do to a server
what nobody told the backend of.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest

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
from models_admin.policy.rollout import Slot
from tests.hosted_machine import NORMAL, REFUSES

A, B = ReplicaName("m", 0), ReplicaName("m", 1)
LIMIT_S = 20.0


def launch(name: ReplicaName = A, mode: int = NORMAL, *locks: str) -> Launch:
    return Launch(
        name=name,
        model_name="m",
        checkpoint=f"tiny:{mode}",
        slot=Slot(7, 3),
        binding=Binding(locks=locks),
    )


class HostingContract(ABC):
    """The suite; `backend` is a fixture of the deriving class by way of `make`."""

    @abstractmethod
    def make(self, request: pytest.FixtureRequest) -> HostingBackend:
        """Return a backend of its own."""

    @abstractmethod
    def kill(self, backend: HostingBackend, living: Living, name: ReplicaName) -> None:
        """End a server as a crash does."""

    @abstractmethod
    def notify(self, backend: HostingBackend, living: Living, name: ReplicaName) -> None:
        """Tell a server to end, behind the backend's back."""

    @pytest.fixture
    def backend(self, request: pytest.FixtureRequest) -> Iterator[HostingBackend]:
        backend = self.make(request)
        yield backend
        backend.stop_all()

    def test_a_server_becomes_ready_and_says_what_it_is(self, backend: HostingBackend) -> None:
        backend.start(launch())

        living = until_ready(backend, A)

        assert living.address.startswith("http://")
        assert living.version == "stub-0"
        assert living.slot == Slot(7, 3), "what it was launched for comes back"
        assert living.host
        assert living.log_tail
        assert (living.stopping, living.draining) == (False, False)

    def test_a_name_that_lives_is_not_started_twice(self, backend: HostingBackend) -> None:
        backend.start(launch())

        with pytest.raises(LaunchFailed):
            backend.start(launch())

    def test_a_device_that_is_held_starts_nothing(self, backend: HostingBackend) -> None:
        backend.start(launch(A, NORMAL, "box-0"))

        with pytest.raises(DevicesHeld):
            backend.start(launch(B, NORMAL, "box-0"))
        backend.start(launch(B, NORMAL, "box-1"))

        assert until_ready(backend, B)

    def test_one_that_is_told_to_end_ends_well_and_once(self, backend: HostingBackend) -> None:
        backend.start(launch())
        until_ready(backend, A)

        backend.stop(A)
        backend.stop(A)
        ending = until_ended(backend, A)

        assert ending.clean
        assert A not in backend.observe().ended, "told once"
        backend.stop(A)
        backend.start(launch())

    def test_one_that_crashes_is_told_of_and_its_device_is_free(
        self, backend: HostingBackend
    ) -> None:
        backend.start(launch(A, NORMAL, "box-0"))
        self.kill(backend, until_ready(backend, A), A)

        ending = until_ended(backend, A)

        assert (ending.clean, ending.refused) == (False, False)
        assert "SIGKILL" in ending.text
        backend.start(launch(B, NORMAL, "box-0"))

    def test_a_notice_from_outside_is_no_crash(self, backend: HostingBackend) -> None:
        backend.start(launch())
        self.notify(backend, until_ready(backend, A), A)

        assert until_ended(backend, A).clean

    def test_one_that_cannot_load_says_why(self, backend: HostingBackend) -> None:
        backend.start(launch(A, REFUSES))

        ending = until_ended(backend, A)

        assert ending.refused
        assert ending.text.startswith("wrong_shapes: ")
        assert ending.log_tail

    def test_a_check_says_the_same_without_a_server(self, backend: HostingBackend) -> None:
        passed = until_checked(backend, launch())
        refused = until_checked(backend, launch(A, REFUSES))

        assert passed == Verdict(passed=True, text="")
        assert not refused.passed
        assert refused.text.startswith("wrong_shapes: ")
        assert backend.observe().living == {}

    def test_none_is_left_when_all_are_stopped(self, backend: HostingBackend) -> None:
        backend.start(launch(A))
        backend.start(launch(B))

        backend.stop_all()

        assert backend.observe().living == {}
        backend.start(launch(A))


def until_ready(backend: HostingBackend, name: ReplicaName) -> Living:
    deadline = time.monotonic() + LIMIT_S
    while True:
        living = backend.observe().living.get(name)
        if living is not None and living.ready and living.log_tail:
            return living
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_ended(backend: HostingBackend, name: ReplicaName) -> Ending:
    deadline = time.monotonic() + LIMIT_S
    while (ending := backend.observe().ended.get(name)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return ending


def until_checked(backend: HostingBackend, of: Launch) -> Verdict:
    deadline = time.monotonic() + LIMIT_S
    while (verdict := backend.check(of)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return verdict
