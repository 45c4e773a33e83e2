"""`manage.py up` and `down` with their servers, on a terminal and below `make`.

What our own processes do is the business of the acceptance tests.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from airs_site import embedded
from airs_site.management.commands.up import PROCESSES, processes
from airs_site.processes import read_pid
from airs_site.supervisor import REPOSITORY

pytestmark = pytest.mark.timeout(120)

_EVERYTHING = ",".join(PROCESSES)


@dataclass(frozen=True, kw_only=True)
class Home:
    path: Path
    environment: dict[str, str]

    def manage(self, *arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, "manage.py", *arguments),
            cwd=REPOSITORY,
            env=self.environment | changed,
            capture_output=True,
            text=True,
        )

    def pid_files(self) -> list[str]:
        return sorted(path.stem for path in (self.path / "run").glob("*.pid"))


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    path = Path(tempfile.mkdtemp(prefix="airs-test-"))
    path.chmod(0o711)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**os.environ, "AIRS_HOME": str(path), "AIRS_PORT": port}
    # Servers of its own, not those of the test session.
    for name in ("DATABASE_URL", "REDIS_URL"):
        environment.pop(name, None)
    for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):  # `make test` runs us: ours is no sub-make
        environment.pop(name, None)
    home = Home(path=path, environment=environment)
    yield home
    home.manage("down")
    embedded.remove(path)
    assert not path.exists()


_ON_A_TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


class Terminal:
    """`make up` on a terminal of its own."""

    def __init__(self, home: Home) -> None:
        makefile = home.path / "Makefile"
        makefile.write_text(f"up:\n\t@'{sys.executable}' manage.py up --without {_EVERYTHING}\n")
        self.process = subprocess.Popen(
            (sys.executable, "-c", _ON_A_TERMINAL, "make", "-f", makefile, "up"),
            cwd=REPOSITORY,
            env=home.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.output = ""

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        while text not in self.output:
            line = self.process.stdout.readline()
            assert line, f"ended without {text!r}:\n{self.output}"
            self.output += line

    def press_ctrl_c(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\x03")
        self.process.stdin.flush()

    def exit_code(self) -> int:
        self.output += self.process.communicate()[0]
        return self.process.returncode


@pytest.fixture
def terminal(home: Home) -> Iterator[Terminal]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    terminal = Terminal(home)
    yield terminal
    with terminal.process:
        home.manage("down")


def test_ctrl_c_in_make_up_stops_everything_and_ends_with_0(home: Home, terminal: Terminal) -> None:
    terminal.wait_for("ready; Ctrl-C stops everything")
    running = home.pid_files()
    credentials = home.path / "credentials.json"

    terminal.press_ctrl_c()

    assert terminal.exit_code() == 0
    assert terminal.output.rstrip().endswith("stopped")
    assert running == ["postgres", "supervisor", "valkey"]
    assert home.pid_files() == []
    assert credentials.stat().st_mode & 0o777 == 0o600


def test_down_stops_a_stack_in_another_terminal(home: Home, terminal: Terminal) -> None:
    terminal.wait_for("ready; Ctrl-C stops everything")
    servers = [read_pid(home.path, name) for name in ("postgres", "valkey")]

    second = home.manage("up", "--without", _EVERYTHING)
    down = home.manage("down")
    again = home.manage("down")

    assert None not in servers
    assert second.returncode == 1
    assert "is in use by process" in second.stderr
    assert down.stdout.strip() == "stopped: supervisor"
    assert terminal.exit_code() == 0
    assert again.stdout.strip() == "nothing was running"
    assert home.pid_files() == []


def test_a_busy_port_is_named_and_nothing_stays(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = str(somebody.getsockname()[1])
        up = home.manage("up", AIRS_PORT=port)

    assert up.returncode == 1
    assert f"Port {port} is in use" in up.stderr
    assert "AIRS_PORT" in up.stderr
    assert home.pid_files() == []


@pytest.mark.parametrize(("given", "taken"), [({}, "2"), ({"MALLOC_ARENA_MAX": "4"}, "4")])
def test_threads_of_the_web_server_share_two_arenas_or_as_many_as_one_asks_for(
    tmp_path: Path, given: dict[str, str], taken: str
) -> None:
    started = {process.name: process for process in processes(tmp_path, given, with_flower=False)}

    assert started["web"].env["MALLOC_ARENA_MAX"] == taken
    assert started["executors"].env == given
