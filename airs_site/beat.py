"""Beat's scheduler: django-celery-beat's, which asks less often whether its schedule was changed.

It asks twice a tick, and beat ticks several times within the ten milliseconds before each task:
ten statements a second on an idle installation, most of what beat costs.
"""

import time

from django_celery_beat.schedulers import DatabaseScheduler  # type: ignore[import-untyped]

LOOK_S = 2.0
"""How long the schedule is believed."""


class Scheduler(DatabaseScheduler):  # type: ignore[misc]
    """Follows changes of the schedule, in the admin say, a little later."""

    _look_at = 0.0

    def schedule_changed(self) -> bool:
        """Say whether it was changed since the last look; not looked at is taken for no."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        changed: bool = super().schedule_changed()
        return changed
