"""Fail points: this process dies, or loses its database, at a chosen statement boundary.

A boundary lies before each statement, before and after each COMMIT, after each statement that
commits by itself, and wherever a scene says so (`reach`: a message sent, a model called). Death
closes the socket and raises `Died`, which no code catches; from then on every statement, COMMIT
and new connection dies as well, so that no cleanup can repair anything, as after kill -9. A break
only closes the socket: the code goes on as it does when the database was away. After a COMMIT the
answer is lost, which is the worst moment of all.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg2
import psycopg2.extensions
import pytest
from django.db import DatabaseError, InterfaceError, connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.postgresql.base import DatabaseWrapper

How = Literal["dies", "breaks"]


class Died(BaseException):
    """The process is dead: nothing after this point happens."""


@dataclass(kw_only=True)
class FailPoints:
    """Counts the boundaries that are crossed, from 0, and strikes at one of them."""

    at: int | None = None
    how: How = "dies"
    at_each: Callable[[], None] = lambda: None
    """Called at each boundary: a look at what is committed, from another session."""
    passed: list[str] = field(default_factory=list)
    dead: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def struck(self) -> bool:
        """Whether the chosen boundary was reached."""
        return self.at is not None and len(self.passed) > self.at

    def reach(self, name: str, raw: Any = None, *, answer_lost: bool = False) -> None:
        """Cross a boundary; `raw` is the psycopg2 connection that it lies on."""
        with self._lock:
            if self.dead:
                raise Died
            here = len(self.passed)
            self.passed.append(name)
        self.at_each()
        if here != self.at:
            return
        if raw is None and connection.connection is not None:
            raw = connection.connection
        if raw is not None and not raw.closed:
            cut(raw)
        if self.how == "dies":
            self.dead = True
            raise Died
        if answer_lost:
            raise psycopg2.OperationalError("server closed the connection unexpectedly")


def cut(raw: Any) -> None:
    """Close the socket of a connection; its session rolls back."""
    with socket.socket(fileno=os.dup(raw.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def watched(points: FailPoints) -> Iterator[FailPoints]:
    """Let the statements of this process cross the fail points; swallow its death."""

    class Cursor(psycopg2.extensions.cursor):
        def execute(self, query: Any, vars: Any = None) -> None:
            points.reach(_name(query), self.connection)
            super().execute(query, vars)
            self._committed(query)

        def copy_expert(self, sql: Any, file: Any, size: int = 8192) -> None:
            points.reach(_name(sql), self.connection)
            super().copy_expert(sql, file, size)
            self._committed(sql)

        def _committed(self, query: Any) -> None:
            if self.connection.autocommit:
                points.reach(f"after {_name(query)}", self.connection, answer_lost=True)

    commit: Callable[[BaseDatabaseWrapper], None] = BaseDatabaseWrapper._commit  # type: ignore[attr-defined]
    connect = DatabaseWrapper.get_new_connection

    def counted_commit(self: BaseDatabaseWrapper) -> None:
        raw = self.connection
        points.reach("COMMIT", raw)
        commit(self)
        with self.wrap_database_errors:
            points.reach("after COMMIT", raw, answer_lost=True)

    def counted_connection(self: DatabaseWrapper, conn_params: Any) -> Any:
        if points.dead:
            raise Died
        raw = connect(self, conn_params)
        raw.cursor_factory = Cursor
        return raw

    connection.ensure_connection()
    connection.connection.cursor_factory = Cursor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseDatabaseWrapper, "_commit", counted_commit)
        patch.setattr(DatabaseWrapper, "get_new_connection", counted_connection)
        try:
            yield points
            points.reach("return")
        except Died:
            pass
        except (DatabaseError, InterfaceError):
            # The process met a broken connection and gave up, or its death met a `finally`.
            if not points.struck:
                raise
    # In any case a new one: what the process held is gone with it, transactions included.
    connection.close()
    connection.connection = None
    connection.in_atomic_block = connection.closed_in_transaction = False


def _name(query: Any) -> str:
    text = query.decode() if isinstance(query, bytes) else str(query)
    return " ".join(text.split())[:60]
