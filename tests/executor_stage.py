"""A dispatcher and an executor on the real database, joined without a broker or model management.

A test says where replicas are (`serve`), claims (`send`) and rates (`rate`); retries are due at
once. Tests that use it need committed transactions.
"""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.db import connection

from tests import builders
from tests.rating_queue import Message, Queue, Replica, boot, end_pauses, queue
from workers.rating_generator import RatingGenerator


@dataclass(kw_only=True)
class Endpoint:
    """How to call a replica."""

    url: str
    version: str = "1"
    model_name: str = "m"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 5.0
    sends_priority: bool = False
    priority_style: str = ""
    scoring: str = ""
    managed: bool = True
    key_version: str = "1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a reported version."""

    version: str
    changed: bool
    key_version: str = "1"


@dataclass(kw_only=True)
class Directory:
    """Model management in memory: endpoints by replica, and the version it knows."""

    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    known: str = ""
    reports: list[str] = field(default_factory=list)

    def endpoint(self, replica_key: str) -> Endpoint | None:
        return self.endpoints.get(replica_key)

    def report_version(self, model_id: str, version: str, now: datetime) -> Report:
        self.reports.append(version)
        self.known = self.known or version
        return Report(version=self.known, changed=version != self.known)


@dataclass(kw_only=True)
class Stage:
    """A dispatcher and an executor, joined without a broker."""

    dispatcher: Queue
    directory: Directory
    generator: RatingGenerator
    executor: uuid.UUID
    ended: list[int]
    protocol: str = "oip"

    def serve(self, *urls: str, **endpoint: Any) -> None:
        """Let replicas r1, r2, … be at these addresses."""
        self.directory.endpoints = {
            f"r{n}": Endpoint(url=url, **endpoint) for n, url in enumerate(urls, 1)
        }
        self.generator._endpoints.clear()  # it would believe the old ones for a while
        self.dispatcher.fleet.live = [
            Replica(key=key, version="1", protocol=self.protocol)
            for key in self.directory.endpoints
        ]

    def send(self) -> list[Message]:
        """Claim what may be sent."""
        self.dispatcher.wake_and_run()
        return self.dispatcher.take_sent()

    def rate(self, *, times: int = 1) -> None:
        """Claim and rate; retries are due at once."""
        for _ in range(times):
            end_pauses()
            self.rate_ready()

    def rate_ready(self) -> None:
        """Claim and rate what is due; retries wait for their time."""
        for message in self.send():
            self.generator.rate(message.batches, task_id=uuid.uuid4())


@contextmanager
def staged(
    *,
    autorater: str = "oip_score",
    protocol: str = "oip",
    part_s: float = 5.0,
    **rater: Any,
) -> Iterator[Stage]:
    """Set a stage for a rater of this plug-in; its model's replicas come with `serve`."""
    executor = boot(plugins={autorater: "1"})
    directory = Directory()
    ended: list[int] = []
    generator = RatingGenerator(
        boot_id=executor,
        directory=directory,
        utc_now=lambda: datetime.now(UTC),
        ring_completion=ended.extend,
        part_s=part_s,
    )
    settings = {"autorater": autorater, "max_attempts": 4, **rater}
    builders.version(builders.rater(**settings), model_version="1")
    try:
        yield Stage(
            dispatcher=queue(),
            directory=directory,
            generator=generator,
            executor=executor,
            ended=ended,
            protocol=protocol,
        )
    finally:
        generator.close()
        with connection.cursor() as cursor:  # sessions of its threads would keep the test database
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
