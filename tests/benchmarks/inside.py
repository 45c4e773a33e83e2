"""Benchmarks of services alone: each in a process of its own, with a PostgreSQL of its own.

`run` starts both; in the child, `python -m tests.benchmarks.inside NAME`, the module's `measure`
yields figures. Rows are made by SQL (queue_rows), so that a million of them take a minute.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from airs_site import embedded
from tests.benchmarks.report import REPOSITORY, Figure


def run(name: str, *, quick: bool) -> Iterator[Figure]:
    """Yield the figures of one such benchmark as they are measured."""
    home = Path(tempfile.mkdtemp(prefix="airs-bench-")).resolve()
    home.chmod(0o711)  # PostgreSQL's user must get through when root runs this
    try:
        servers = embedded.start(home, environ={})
        environment = {
            **os.environ,
            "AIRS_HOME": str(home),
            "DATABASE_URL": servers.database_url,
            "REDIS_URL": servers.redis_url,
            "DJANGO_SETTINGS_MODULE": "airs_site.settings",
            "AIRS_LOG_LEVEL": "WARNING",
        }
        command = [sys.executable, "-m", "tests.benchmarks.inside", name, str(int(quick))]
        with subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                yield Figure(**json.loads(line))
        if child.returncode:
            raise RuntimeError(f"the benchmark {name} ended with {child.returncode}")
    finally:
        embedded.remove(home)


def _measure(name: str, *, quick: bool) -> None:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    for figure in import_module(f"tests.benchmarks.{name}").measure(quick=quick):
        print(json.dumps(asdict(figure)), flush=True)


if __name__ == "__main__":
    _measure(sys.argv[1], quick=sys.argv[2] == "1")
