"""The clock that decides: PostgreSQL's, so that agents on several machines agree."""

from datetime import datetime

from django.db import connection


def database_now() -> datetime:
    """Return the database's wall clock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        (now,) = cursor.fetchone()
    assert isinstance(now, datetime)
    return now
