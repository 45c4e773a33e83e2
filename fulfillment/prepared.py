"""Statements that PostgreSQL parses and plans once a connection, not once a call.

For the few that run for every message: planning them took as long as running them. psycopg2 knows
no prepared statements, so this says PREPARE and EXECUTE by itself.

Such a plan knows no values; one made while tables were small would scan them when they are large,
until statistics change. So statements are prepared only where scans are off: on the connections of
dispatcher and executors, all of whose statements have an index. Everybody else runs them as they
are.
"""

import re
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.backends.utils import CursorWrapper

_VALUE = re.compile(r"%s::([a-z0-9]+(?:\[\])?)")
_prepared: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Statements by psycopg2 connection, of connections where they may be prepared."""


def allow(connection: BaseDatabaseWrapper) -> None:
    """Prepare statements on this connection, until it is closed."""
    with connection.cursor() as cursor:
        cursor.execute("SET enable_seqscan = off")
        # Else a call with a short array is planned anew each time: that plan looks cheaper.
        cursor.execute("SET plan_cache_mode = force_generic_plan")
    _prepared[connection.connection] = set()


def allow_everywhere() -> None:
    """Prepare statements on all connections that this process will make."""
    connection_created.connect(_allow_new)


def _allow_new(connection: BaseDatabaseWrapper, **_: Any) -> None:
    allow(connection)


def execute(cursor: CursorWrapper, statement: str, values: Sequence[Any] = ()) -> None:
    """Run a statement in which each `%s` has a cast that tells its type."""
    prepared = _prepared.get(cursor.connection)
    if prepared is None:
        cursor.execute(statement, values)
        return
    prepare, call = _forms(statement)
    if statement not in prepared:
        cursor.execute(prepare)
        prepared.add(statement)
    cursor.execute(call, values)


@cache
def _forms(statement: str) -> tuple[str, str]:
    """Return how a statement is prepared and how it is run."""
    # The same in all threads, whoever comes first.
    name = f"airs_{blake2b(statement.encode(), digest_size=8).hexdigest()}"
    types = _VALUE.findall(statement)
    numbers = iter(range(1, len(types) + 1))
    text = _VALUE.sub(lambda _: f"${next(numbers)}", statement)
    assert "%" not in text, f"a value without a cast: {text}"
    if not types:
        return f"PREPARE {name} AS {text}", f"EXECUTE {name}"
    return (
        f"PREPARE {name} ({', '.join(types)}) AS {text}",
        f"EXECUTE {name} ({', '.join(['%s'] * len(types))})",
    )
