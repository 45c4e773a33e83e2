"""Prepared statements answer as plain ones do, and end with their connection."""

from collections.abc import Iterator

import pytest
from django.db import connection
from django.db.backends.utils import CursorWrapper

from fulfillment import prepared
from tests.rating_queue import boot, counts_add_up, queue, rate_all, rater, states, submit

pytestmark = pytest.mark.django_db(transaction=True)

ADD = "SELECT x + %s::int FROM unnest(%s::int[]) AS x ORDER BY x"


@pytest.fixture
def allowed() -> Iterator[None]:
    connection.ensure_connection()
    prepared.allow(connection)
    yield
    connection.close()  # settings and statements end with it


def add(cursor: CursorWrapper) -> list[int]:
    prepared.execute(cursor, ADD, [1, "{10,20}"])
    return [row[0] for row in cursor.fetchall()]


def prepared_now(cursor: CursorWrapper) -> int:
    cursor.execute(
        "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'airs!_%' ESCAPE '!'"
    )
    (count,) = cursor.fetchone()
    return int(count)


def test_a_statement_runs_unprepared_where_scans_are_on() -> None:
    with connection.cursor() as cursor:
        assert add(cursor) == [11, 21]
        assert prepared_now(cursor) == 0


@pytest.mark.usefixtures("allowed")
def test_an_allowed_connection_prepares_a_statement_once() -> None:
    with connection.cursor() as cursor:
        answers = [add(cursor) for _ in range(3)]

        assert answers == [[11, 21]] * 3
        assert prepared_now(cursor) == 1


@pytest.mark.usefixtures("allowed")
def test_a_new_connection_knows_nothing_of_the_old_ones_statements() -> None:
    with connection.cursor() as cursor:
        add(cursor)
    connection.close()

    with connection.cursor() as cursor:
        assert add(cursor) == [11, 21]
        assert prepared_now(cursor) == 0


@pytest.mark.usefixtures("allowed")
def test_a_whole_workflow_is_rated_by_prepared_statements() -> None:
    rater()
    executor = boot()
    first = submit([f"row {i}" for i in range(30)])
    second = submit(["row 1", "row 2", "other", "other"])

    computed = rate_all(queue(), executor)

    assert computed == 31
    for workflow in (first, second):
        assert set(states(workflow)) == {"COMPLETED"}
        counts_add_up(workflow)
    with connection.cursor() as cursor:
        assert prepared_now(cursor) > 10
