"""`manage.py up`: the whole stack on one machine, in the foreground until Ctrl-C.

Servers first, then migrations and `bootstrap` (the first user, token and models), then our own
processes, each under the supervisor. They stop in the opposite order: what takes in and sends out
work, then what does it, then the servers.
"""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import get_commands
from django.core.management.base import BaseCommand, CommandError

from airs_site import embedded
from airs_site.supervisor import HomeInUse, NotReady, Process, Stopped, Supervisor

PROCESSES = (
    "executors",
    "control",
    "host-agent",
    "flower",
    "beat",
    "dispatcher-1",
    "dispatcher-2",
    "web",
)
_SERVERS, _WORKERS, _SOURCES = 0, 1, 2
_READY_TIMEOUT_S = 120.0
# glibc gives each thread an arena of its own, and each would keep what an upload once took in it:
# after some dozens of uploads 400 MiB a process. Threads that share the interpreter need no more.
_WEB_ARENAS = "2"
# A shutdown writes a checkpoint: up to `shared_buffers` of dirty pages.
_POSTGRES_GRACE_S = 60.0


class Command(BaseCommand):
    help = "Run the whole stack in the foreground until Ctrl-C."
    # The database may not be there yet.
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--without",
            type=_process_names,
            default=frozenset(),
            metavar="NAME,…",
            help=f"processes not to start, of: {', '.join(PROCESSES)}",
        )

    def handle(self, *, without: frozenset[str], **options: Any) -> None:
        home: Path = settings.AIRS_HOME
        try:
            with _own_terminal_group(), Supervisor(home, report=self._say) as supervisor:
                self._start_all(supervisor, home=home, without=without)
                supervisor.run()
        except Stopped:
            pass
        except (HomeInUse, NotReady, embedded.ServerError) as error:
            raise CommandError(str(error)) from error
        self._say("stopped")

    def _start_all(self, supervisor: Supervisor, *, home: Path, without: frozenset[str]) -> None:
        with_flower = "flower" not in without
        _check_port("AIRS_PORT", settings.AIRS_PORT)
        if with_flower:
            _check_port("FLOWER_PORT", settings.FLOWER_PORT)
        self._say(f"starting in {home}, logs in {home / 'logs'}")
        env = start_servers(supervisor, home)
        first_start = not _credentials_file(home).exists()
        prepare(supervisor, env)
        for process in processes(home, env, with_flower=with_flower):
            if process.name not in without:
                supervisor.start(process, timeout_s=_READY_TIMEOUT_S)
        self._say(_how_to_log_in(home, first_start=first_start, with_flower=with_flower))
        self._say("ready; Ctrl-C stops everything")

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


def start_servers(supervisor: Supervisor, home: Path) -> dict[str, str]:
    """Starts the servers that no URL replaces; the environment of everything else."""
    servers = embedded.prepare(home, environ=os.environ)
    if not os.environ.get("DATABASE_URL"):
        supervisor.start(
            Process(
                name=embedded.POSTGRES,
                argv=embedded.postgres_command(home),
                env=dict(os.environ),
                ready=partial(embedded.postgres_answers, servers.database_url),
                stage=_SERVERS,
                stop_signal=embedded.POSTGRES_STOP,
                grace_s=_POSTGRES_GRACE_S,
            )
        )
    if not os.environ.get("REDIS_URL"):
        supervisor.start(
            Process(
                name=embedded.VALKEY,
                argv=embedded.valkey_command(home),
                env=dict(os.environ),
                ready=partial(embedded.valkey_answers, servers.redis_url),
                stage=_SERVERS,
                stop_signal=embedded.VALKEY_STOP,
            )
        )
    return {
        **os.environ,
        "AIRS_HOME": str(home),
        "DATABASE_URL": servers.database_url,
        "REDIS_URL": servers.redis_url,
    }


def prepare(supervisor: Supervisor, env: Mapping[str, str]) -> None:
    """Brings the database up to date and makes the first user, token and models.

    In processes of their own: this one read its settings before the servers had addresses.
    """
    for name in ("migrate", "bootstrap"):
        if name in get_commands():
            supervisor.complete(Process(name=name, argv=_manage(name), env=env))


def processes(home: Path, env: Mapping[str, str], *, with_flower: bool) -> Iterator[Process]:
    """Our own processes, in the order of their start."""
    # Events cost a message each; only Flower reads them.
    events = ("-E",) if with_flower else ()
    worker = partial(_worker, home=home, events=events)
    of_workers = partial(Process, env=env, stage=_WORKERS)
    of_sources = partial(Process, env=env, stage=_SOURCES)
    executors = worker("executors", queue="ratings", threads=settings.AIRS_EXECUTOR_CONCURRENCY)
    yield of_workers(name="executors", argv=executors)
    yield of_workers(name="control", argv=worker("control", queue="control", threads=4))
    yield of_workers(name="host-agent", argv=_manage("host_models"))
    if with_flower:
        # It keeps nothing, and hangs on any gentler signal while a thread of its waits for events.
        yield of_workers(name="flower", argv=_flower(home), stop_signal=signal.SIGKILL)
    yield of_sources(name="beat", argv=_celery("beat", "--pidfile="))
    for number in (1, 2):
        yield of_sources(name=f"dispatcher-{number}", argv=_manage("dispatch"))
    few_arenas = {"MALLOC_ARENA_MAX": _WEB_ARENAS, **env}
    yield of_sources(name="web", argv=_web(), env=few_arenas, ready=_web_answers)


def _worker(
    name: str, *, queue: str, threads: int, home: Path, events: tuple[str, ...]
) -> tuple[str, ...]:
    digest = sha256(os.fsencode(home)).hexdigest()[:8]
    return _celery(
        *("worker", "-Q", queue, "-P", "threads", "-c", str(threads)),
        *("-n", f"{name}@%h-{digest}", "--without-gossip", "--without-mingle", *events),
    )


_FLOWER_CONF = """
from flower.views.monitor import Metrics
from tornado.web import authenticated

basic_auth = [{login!r}]
persistent = False
Metrics.get = authenticated(Metrics.get)  # the one page that Flower itself leaves open
"""


def _flower(home: Path) -> tuple[str, ...]:
    # A file, because arguments are everybody's to read, and Flower splits an environment variable
    # at commas, which a password may contain.
    credentials = json.loads(_credentials_file(home).read_text())
    login = f"{credentials['admin_user']}:{credentials['admin_password']}"
    conf = home / "run" / "flower_conf.py"
    conf.touch(mode=0o600)
    conf.write_text(_FLOWER_CONF.format(login=login))
    address = ("--address=127.0.0.1", f"--port={settings.FLOWER_PORT}")
    return _celery("flower", *address, f"--conf={conf}")


def _web() -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "gunicorn", "airs_site.wsgi", "--no-control-socket"),
        *("--worker-class", "gthread", "--workers", "2", "--threads", "16"),
        *("--bind", f"127.0.0.1:{settings.AIRS_PORT}", "--graceful-timeout", "10"),
    )


def _web_answers() -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", settings.AIRS_PORT, timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def _celery(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "celery", "-A", "airs_site.celery", *arguments)


def _manage(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "manage.py", *arguments)


def _how_to_log_in(home: Path, *, first_start: bool, with_flower: bool) -> str:
    lines = [f"AIRS     http://127.0.0.1:{settings.AIRS_PORT}/admin/  (API: /api/docs)"]
    if with_flower:
        lines.append(f"Flower   http://127.0.0.1:{settings.FLOWER_PORT}/")
    path = _credentials_file(home)
    if first_start and path.exists():
        credentials = json.loads(path.read_text())
        lines.append(f"user     {credentials['admin_user']}  {credentials['admin_password']}")
        lines.append(f"token    {credentials['api_token']}")
    lines.append(f"secrets  {path}")
    return "\n".join(lines)


def _credentials_file(home: Path) -> Path:
    return home / "credentials.json"


def _check_port(variable: str, port: int) -> None:
    if not embedded.is_free(port):
        raise CommandError(f"Port {port} is in use. Choose another: {variable}=… make up")


def _process_names(text: str) -> frozenset[str]:
    names = frozenset(filter(None, text.split(",")))
    if unknown := names.difference(PROCESSES):
        raise CommandError(f"no such process: {', '.join(sorted(unknown))}")
    return names


_RELAY = """
import os, signal, sys
def forward(number, frame):
    os.kill(int(sys.argv[1]), signal.SIGINT)
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, forward)
signal.signal(signal.SIGTSTP, signal.SIG_IGN)
sys.stdout.write("r")
sys.stdout.flush()
sys.stdin.read()
"""


@contextlib.contextmanager
def _own_terminal_group() -> Iterator[None]:
    """Lets `make up` end with 0 on Ctrl-C.

    The terminal sends SIGINT to its whole foreground process group, and make dies of it whatever
    its command answers. So a small child with a group of its own becomes the foreground, and
    passes the signal on to this process alone.
    """
    if "MAKELEVEL" not in os.environ or not _in_foreground():
        yield
        return
    relay = subprocess.Popen(
        (sys.executable, "-c", _RELAY, str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert relay.stdout is not None
    relay.stdout.read(1)
    # Background processes get this signal when they touch the terminal.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(sys.stdin.fileno(), relay.pid)
    try:
        yield
    finally:
        os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
        signal.signal(signal.SIGTTOU, before)
        relay.communicate()


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return False
