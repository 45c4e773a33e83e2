"""`manage.py down`: stops a stack that was left behind, or one that runs in another terminal."""

from typing import Any

import psutil
from django.conf import settings
from django.core.management.base import BaseCommand

from airs_site import embedded
from airs_site.processes import end_leftovers, read_pid

# As long as `up` may take to stop its three stages.
_STOP_TIMEOUT_S = 120.0


class Command(BaseCommand):
    help = "Stop the stack of this AIRS_HOME, with its embedded servers. The data stays."
    requires_system_checks = []

    def handle(self, **options: Any) -> None:
        home = settings.AIRS_HOME
        stopped = ["supervisor"] if self._stop_supervisor() else []
        stopped += end_leftovers(home)
        embedded.stop(home)
        self.stdout.write(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")

    def _stop_supervisor(self) -> bool:
        if (pid := read_pid(settings.AIRS_HOME, "supervisor")) is None:
            return False
        try:
            supervisor = psutil.Process(pid)
            supervisor.terminate()
            supervisor.wait(_STOP_TIMEOUT_S)
        except psutil.TimeoutExpired:
            # What follows kills it; its guard ends what it leaves.
            return False
        except psutil.NoSuchProcess:
            pass
        return True
