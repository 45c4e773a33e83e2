"""AIRS in one process, on a database that notes each change of a request."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection
from pytest_django import Settings

from fulfillment import erasing, expiry, purging, raters, spool
from fulfillment.clock import database_now
from fulfillment.models import Rater, Role
from tests import builders
from tests.builders import MODEL, RATER, Api
from tests.chaos import laws
from tests.chaos.scenes import BATCH, CHUNK
from tests.chaos.world import World, looker
from tests.fakes import Step, scripted

SMALL = (
    (spool, "CHUNK_ROWS", CHUNK),
    (purging, "CHUNK", CHUNK),
    (purging, "STEPS_IN_CALL", 3),
    (purging, "_OF_URL", 2),
    (erasing, "CHUNK", BATCH),
    (expiry, "CHUNK", BATCH),
)
"""What goes in steps goes in several ones."""


@pytest.fixture
def world(
    settings: Settings, transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(
        Rater(id=RATER, autorater="stub", model_id=MODEL, batch_size=BATCH, score_max=4.0),
        now=database_now(),
    )
    settings.AIRS_SHADOW_REFRESH = 0.0
    for module, name, size in SMALL:
        monkeypatch.setattr(module, name, size)
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.1",)
    with looker() as look, scripted(Step()) as receiver, connection.cursor() as cursor:
        laws.remember_moves(cursor.execute)
        try:
            yield World(
                look=look,
                api=Api(),
                operator=Api("olga", Role.OPERATOR),
                receiver=f"{receiver.url}/hook",
                heard=receiver.seen,
            )
        finally:
            connection.close()
            with connection.cursor() as again:
                laws.forget_moves(again.execute)
