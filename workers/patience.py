"""Database steps that outlast a database that is away for a moment."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, OperationalError, connection

logger = logging.getLogger(__name__)

T = TypeVar("T")

AWAY_S = 60.0
"""How long a step is repeated while the database is away; then the lease brings the work back."""
_PAUSE_S = 0.5


def surely(step: Callable[[], T], *, for_s: float = AWAY_S) -> T:
    """Do a database step, again while the database is away, for as long as a lease may last.

    Each step is safe to do twice: it counts only under its fence.
    """
    deadline = time.monotonic() + for_s
    while True:
        try:
            return step()
        except (DatabaseError, InterfaceError) as error:
            # psycopg2 says a plain DatabaseError when the server dies in the middle of a statement.
            lost = connection.connection is None or connection.connection.closed
            away = lost or isinstance(error, OperationalError | InterfaceError)
            connection.close()
            if not away or time.monotonic() > deadline:
                raise
            logger.warning("database is away: %s", error)
            threading.Event().wait(_PAUSE_S)
