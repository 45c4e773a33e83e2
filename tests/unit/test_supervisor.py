"""The supervisor with real, tiny processes.

It needs a main thread of its own for its signals, so that each test drives one in a subprocess.
Children tell what happens through a named pipe, which is also what the tests wait for.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airs_site import supervisor as module
from airs_site.processes import end_leftovers, read_pid, write_pid
from airs_site.supervisor import REPOSITORY, restart_pause, rotate_log

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
home = Path(os.environ["TEST_HOME"])
def tell(line):
    with (home / "pipe").open("w") as pipe:
        pipe.write(line + "\\n")
"""

DRIVER = """
from functools import partial
from airs_site.supervisor import HomeInUse, NotReady, Process, Stopped, Supervisor
def process(name, script, **options):
    command = (sys.executable, "-c", os.environ["TEST_PRELUDE"] + script)
    return Process(name=name, argv=command, env=dict(os.environ), **options)
def say(line):
    print(line, flush=True)
"""

SLEEPER = "tell(f'started {os.getpid()}'); time.sleep(60)"
"""Tells its pid and lasts."""

PARENT = """
command = (sys.executable, "-c", "import time; time.sleep(60)")
inside = subprocess.Popen(command)
outside = subprocess.Popen(command, start_new_session=True)
tell(f"started {os.getpid()} {inside.pid} {outside.pid}")
time.sleep(60)
"""
"""Has a child in its process group and one that left it."""

TELLS_ITS_STOP = """
def stop(number, frame):
    tell("stopped " + NAME)
    sys.exit()
signal.signal(signal.SIGTERM, stop)
tell("started")
time.sleep(60)
"""


@dataclass
class Stage:
    """A home, the pipe on which its processes talk, and the supervisors that a test drives."""

    home: Path
    drivers: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        os.mkfifo(self.home / "pipe")
        # Open for both, so that reading never meets an end.
        self.pipe = os.fdopen(os.open(self.home / "pipe", os.O_RDWR), "r")

    def supervise(self, script: str) -> subprocess.Popen[str]:
        env = {**os.environ, "TEST_HOME": str(self.home), "TEST_PRELUDE": PRELUDE}
        driver = subprocess.Popen(
            (sys.executable, "-c", PRELUDE + DRIVER + textwrap.dedent(script)),
            cwd=REPOSITORY,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.drivers.append(driver)
        return driver

    def heard(self) -> list[str]:
        """Waits for the next line from a child; its words."""
        return self.pipe.readline().split()

    def started(self) -> list[psutil.Process]:
        """Waits for a child to tell its pid and those of its children."""
        word, *pids = self.heard()
        assert word == "started"
        return [psutil.Process(int(pid)) for pid in pids]

    def close(self) -> None:
        for driver in self.drivers:
            with driver:
                driver.kill()
        end_leftovers(self.home)
        self.pipe.close()


pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def line(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline().strip()


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end within ten seconds."""
    _, left = psutil.wait_procs(list(processes), timeout=10)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("failures", "pause_s"), [(0, 0.2), (1, 0.4), (2, 0.8), (7, 25.6), (8, 30.0), (10_000, 30.0)]
)
def test_restart_pause_doubles_up_to_a_limit(failures: int, pause_s: float) -> None:
    assert restart_pause(failures=failures) == pytest.approx(pause_s)


@given(st.integers(min_value=0, max_value=10**9))
def test_restart_pause_never_shrinks_with_more_failures(failures: int) -> None:
    assert 0 < restart_pause(failures=failures) <= restart_pause(failures=failures + 1) <= 30


def test_sigterm_stops_children_with_theirs_and_ends_well(stage: Stage) -> None:
    driver = stage.supervise(
        f"""
        with Supervisor(home) as supervisor:
            supervisor.start(process("parent", {PARENT!r}))
            supervisor.run()
        say("all stopped")
        """
    )
    family = stage.started()
    pid = read_pid(stage.home, "parent")
    group = os.getpgid(family[0].pid)

    driver.terminate()

    assert driver.communicate()[0].strip() == "all stopped"
    assert driver.returncode == 0
    assert living(family) == []
    assert pid == group == family[0].pid
    assert list((stage.home / "run").glob("*.pid")) == []


def test_a_child_that_dies_is_started_again(stage: Stage) -> None:
    driver = stage.supervise(
        f"""
        with Supervisor(home, report=say) as supervisor:
            supervisor.start(process("sleeper", {SLEEPER!r}))
            supervisor.run()
        """
    )
    (first,) = stage.started()

    first.kill()
    reported = line(driver)
    (second,) = stage.started()

    assert reported == "sleeper ended (SIGKILL), starts again in 0.2 s"
    assert second.pid != first.pid
    assert read_pid(stage.home, "sleeper") == second.pid


def test_what_a_dead_child_leaves_in_its_group_ends_before_the_next_start(stage: Stage) -> None:
    stage.supervise(
        f"""
        with Supervisor(home) as supervisor:
            supervisor.start(process("parent", {PARENT!r}))
            supervisor.run()
        """
    )
    parent, inside, outside = stage.started()

    parent.kill()
    stage.started()

    assert not inside.is_running() or inside.status() == psutil.STATUS_ZOMBIE
    # It left the group on purpose: only the end of the whole stack ends it.
    assert outside.is_running()


def test_pauses_grow_while_a_child_keeps_dying(stage: Stage) -> None:
    driver = stage.supervise(
        """
        with Supervisor(home, report=say) as supervisor:
            supervisor.start(process("faulty", "sys.exit(3)"))
            supervisor.run()
        """
    )

    reported = [line(driver) for _ in range(3)]

    assert reported == [
        f"faulty ended (exit code 3), starts again in {pause_s} s" for pause_s in (0.2, 0.4, 0.8)
    ]


def test_kill_of_the_supervisor_ends_its_children_and_theirs(stage: Stage) -> None:
    driver = stage.supervise(
        f"""
        with Supervisor(home) as supervisor:
            supervisor.start(process("parent", {PARENT!r}))
            supervisor.run()
        """
    )
    family = stage.started()

    driver.kill()

    assert living(family) == []


def test_the_next_supervisor_ends_what_a_killed_one_and_its_guard_left(stage: Stage) -> None:
    driver = stage.supervise(
        f"""
        with Supervisor(home) as supervisor:
            supervisor.start(process("parent", {PARENT!r}))
            supervisor.run()
        """
    )
    parent, *orphans = stage.started()
    supervisor = psutil.Process(driver.pid)
    guards = [child for child in supervisor.children() if child.pid != parent.pid]
    # Frozen first, so that it cannot start another guard or another parent.
    supervisor.suspend()
    for process in (*guards, supervisor, parent):
        process.kill()
    survived = [orphan.is_running() for orphan in orphans]

    successor = stage.supervise(
        """
        with Supervisor(home) as supervisor:
            say("in charge")
        """
    )

    assert len(guards) == 1
    assert survived == [True, True]
    assert line(successor) == "in charge"
    assert living(orphans) == []


def test_a_home_has_one_supervisor_and_the_second_names_the_first(stage: Stage) -> None:
    first = stage.supervise(
        """
        with Supervisor(home) as supervisor:
            say("in charge")
            supervisor.run()
        """
    )
    assert line(first) == "in charge"

    second = stage.supervise(
        """
        try:
            with Supervisor(home) as supervisor:
                say("in charge")
        except HomeInUse as error:
            say(error.holder)
        """
    )

    assert line(second) == str(first.pid)
    assert first.poll() is None


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(stage: Stage) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
    driver = stage.supervise(
        f"""
        with Supervisor(home, report=say) as supervisor:
            supervisor.start(process("stubborn", {stubborn!r}, grace_s=0.2))
            supervisor.run()
        """
    )
    family = stage.started()

    driver.terminate()

    assert driver.communicate()[0].strip() == "stubborn does not stop and is killed"
    assert driver.returncode == 0
    assert living(family) == []


def test_stages_stop_from_the_highest_down(stage: Stage) -> None:
    driver = stage.supervise(
        f"""
        with Supervisor(home) as supervisor:
            for name, number in (("server", 0), ("worker", 1), ("source", 2)):
                script = {TELLS_ITS_STOP!r}.replace("NAME", repr(name))
                supervisor.start(process(name, script, stage=number))
            supervisor.run()
        """
    )
    for _ in range(3):
        assert stage.heard() == ["started"]

    driver.terminate()

    assert [stage.heard()[1] for _ in range(3)] == ["source", "worker", "server"]


def test_start_waits_until_the_process_is_ready(stage: Stage) -> None:
    driver = stage.supervise(
        """
        mark = home / "mark"
        script = "(home / 'mark').touch(); time.sleep(60)"
        with Supervisor(home) as supervisor:
            supervisor.start(process("slow", script, ready=mark.exists))
            say(mark.exists())
        """
    )

    assert line(driver) == "True"


def test_a_process_that_never_gets_ready_fails_with_the_end_of_its_log(stage: Stage) -> None:
    driver = stage.supervise(
        f"""
        try:
            with Supervisor(home) as supervisor:
                supervisor.start(process("other", {SLEEPER!r}))
                faulty = process("faulty", "sys.exit('no such thing')", ready=lambda: False)
                supervisor.start(faulty, timeout_s=0.5)
        except NotReady as error:
            say(error)
        """
    )
    family = stage.started()
    said = driver.communicate()[0]

    assert "faulty does not get ready" in said
    assert "no such thing" in said
    assert living(family) == []


@pytest.mark.parametrize(
    ("script", "said"), [("sys.exit(0)", "done"), ("sys.exit('went wrong')", "went wrong")]
)
def test_complete_runs_a_step_to_its_end(stage: Stage, script: str, said: str) -> None:
    driver = stage.supervise(
        f"""
        try:
            with Supervisor(home) as supervisor:
                supervisor.complete(process("step", {script!r}))
                say("done")
        except NotReady as error:
            say(error)
        """
    )

    assert said in driver.communicate()[0]


def test_a_pid_file_never_names_a_later_process_with_the_same_pid(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "worker.pid"
    with subprocess.Popen(("sleep", "60")) as stranger:
        write_pid(tmp_path, "worker", stranger.pid)
        noted = read_pid(tmp_path, "worker")
        pid, identity, stop_signal = path.read_text().split()
        path.write_text(f"{pid}\n1{identity}\n{stop_signal}\n")

        assert noted == stranger.pid
        assert read_pid(tmp_path, "worker") is None
        assert end_leftovers(tmp_path) == []
        assert stranger.poll() is None
        stranger.kill()


def test_a_full_log_is_emptied_while_its_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOG_LIMIT_BYTES", 10)
    log = tmp_path / "web.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"before the rotation\n")
        rotate_log(log)
        writer.write(b"after\n")
        rotate_log(log)

    assert log.read_text() == "after\n"
    assert (tmp_path / "web.log.1").read_text() == "before the rotation\n"
