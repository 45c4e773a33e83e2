"""pytest plugin (`-p tests.servers`): PostgreSQL and Valkey for one test session.

They run in a temporary home, made before Django reads its settings and removed at the end. The
servers of a running stack (`DATABASE_URL`, `REDIS_URL`, `AIRS_HOME`) are never used;
`AIRS_TEST_DATABASE_URL` and `AIRS_TEST_REDIS_URL` name servers of one's own. Workers of
pytest-xdist inherit the addresses; each has databases of its own in both.
"""

import atexit
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from airs_site import embedded
from airs_site.supervisor import Guard

_WITHOUT_SERVERS = {"-h", "--help", "-V", "--version", "--markers", "--fixtures"}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None]:
    # A wrapper runs before every plain hook, and so before pytest-django loads the settings.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        # pytest-django gives it a PostgreSQL database. Number 0 is for runs without workers.
        base, _, _ = os.environ["REDIS_URL"].rpartition("/")
        os.environ["REDIS_URL"] = f"{base}/{int(worker.removeprefix('gw')) + 1}"
    elif not _WITHOUT_SERVERS.intersection(args):
        _start(early_config)
    return (yield)


def _start(config: pytest.Config) -> None:
    home = Path(tempfile.mkdtemp(prefix="airs-test-")).resolve()
    # PostgreSQL's user must get through when root runs the tests.
    home.chmod(0o711)
    guard = Guard(home)
    ended: list[None] = []

    def end() -> None:
        if not ended:
            ended.append(None)
            embedded.remove(home)
            guard.dismiss()

    # At the end of the session, also after Ctrl-C; at exit for what ends before a session begins.
    config.add_cleanup(end)
    atexit.register(end)
    own = {
        name: url
        for name in ("DATABASE_URL", "REDIS_URL")
        if (url := os.environ.get(f"AIRS_TEST_{name}", ""))
    }
    servers = embedded.start(home, environ=own)
    os.environ |= {
        "AIRS_HOME": str(home),
        "DATABASE_URL": servers.database_url,
        "REDIS_URL": servers.redis_url,
    }
