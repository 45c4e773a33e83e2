"""Faults for a running stack, drawn by seed: kill -9, SIGSTOP, lost brokers and databases."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import redis

from tests.acceptance.stack import REPOSITORY, Stack, Stub, until

LEADER_LOCK = 0x41495253


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One harm. `loses` says whether model calls under way may have to be made again."""

    name: str
    do: Callable[[Stack, Stub, random.Random], None]
    loses: bool = False


def leader(stack: Stack) -> str:
    """Return which dispatcher holds the lock."""
    found: list[str] = []

    def look() -> bool:
        held = stack.query(
            "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
            " WHERE l.locktype = 'advisory' AND l.granted AND l.objid = %s",
            LEADER_LOCK,
        )
        found[:] = [
            name
            for name in ("dispatcher-1", "dispatcher-2")
            if (f"airs-dispatch-{stack.pid(name)}",) in held
        ]
        return bool(found)

    until(look, timeout_s=30, what="a dispatcher leads")
    return found[0]


def kill(stack: Stack, name: str) -> None:
    """SIGKILL a process and its children; one that is only just coming back is waited for."""

    def killed() -> bool:
        with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
            stack.kill(name)
            return True
        return False

    until(killed, timeout_s=30, what=f"{name} runs")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP a process and its children, and let them go on at the end."""
    process = psutil.Process(pid)
    victims = [process, *process.children(recursive=True)]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
    try:
        yield
    finally:
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()


def freeze(stack: Stack, name: str, for_s: float) -> None:
    """Stop a process for a while."""
    pid = until(lambda: stack.pid(name), timeout_s=30, what=f"{name} runs")
    with contextlib.suppress(psutil.NoSuchProcess), frozen(pid):
        time.sleep(for_s)


def restart_stub(stub: Stub) -> None:
    """Start the model server again, at its address and with its tally."""
    stub.process = subprocess.Popen(
        [
            sys.executable, "-m", "tests.fakes", "oip", "--port", str(stub.port), "--tally",
            str(stub.tally_path), "--delay", str(DELAY_S),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert stub.process.stdout is not None
    assert stub.process.stdout.readline().startswith("READY")


DELAY_S = 0.25


def broker(stack: Stack) -> "redis.Redis":
    """Return a client of the stack's broker."""
    servers = json.loads((stack.home / "run" / "servers.json").read_text())
    return redis.Redis.from_url(servers["redis_url"])


def _killing(name: str, *, loses: bool = False) -> Fault:
    return Fault(name=f"kill {name}", do=lambda stack, *_: kill(stack, name), loses=loses)


def _freezing(name: str, least_s: float, most_s: float, *, loses: bool = False) -> Fault:
    return Fault(
        name=f"freeze {name} {least_s:g}-{most_s:g} s",
        do=lambda stack, _, chance: freeze(stack, name, chance.uniform(least_s, most_s)),
        loses=loses,
    )


def _kill_leader(stack: Stack, *_: object) -> None:
    kill(stack, leader(stack))


def _kill_both(stack: Stack, *_: object) -> None:
    kill(stack, "dispatcher-1")
    kill(stack, "dispatcher-2")


def _freeze_leader(stack: Stack, _: Stub, chance: random.Random) -> None:
    freeze(stack, leader(stack), chance.uniform(1, 14))


def _terminate(name: str) -> Callable[..., None]:
    def do(stack: Stack, *_: object) -> None:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            # PostgreSQL takes SIGINT for a fast shutdown, and so does the broker.
            stack.signal(name, signal.SIGINT)

    return do


def _flush(stack: Stack, *_: object) -> None:
    with contextlib.suppress(redis.RedisError):
        broker(stack).flushall()


def _flush_again_and_again(stack: Stack, _: Stub, chance: random.Random) -> None:
    for _turn in range(20):
        _flush(stack)
        time.sleep(chance.uniform(0.01, 0.2))


def _kill_stub(stack: Stack, stub: Stub, chance: random.Random) -> None:
    stub.process.kill()
    stub.process.wait(10)
    assert stub.process.stdout is not None
    stub.process.stdout.close()
    time.sleep(chance.uniform(0.0, 4.0))
    restart_stub(stub)


def _freeze_stub(stack: Stack, stub: Stub, chance: random.Random) -> None:
    with frozen(stub.process.pid):
        time.sleep(chance.uniform(0.5, 5.0))


def _break_sessions(stack: Stack, *_: object) -> None:
    until(
        lambda: stack.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ),
        timeout_s=30,
        what="the database is there, with sessions to end",
    )


FAULTS = (
    _killing("executors", loses=True),
    _killing("control"),
    _killing("beat"),
    _killing("web"),
    _killing("valkey", loses=True),
    _killing("postgres", loses=True),
    Fault(name="kill the leading dispatcher", do=_kill_leader),
    Fault(name="kill both dispatchers", do=_kill_both),
    Fault(name="kill the model server", do=_kill_stub, loses=True),
    _freezing("executors", 1, 8),
    # Longer than the silence after which its leases are another's: a zombie comes back.
    _freezing("executors", 17, 22, loses=True),
    _freezing("control", 1, 6),
    _freezing("beat", 1, 12),
    _freezing("web", 1, 4),
    _freezing("valkey", 1, 6, loses=True),
    Fault(name="freeze the leading dispatcher", do=_freeze_leader),
    Fault(name="freeze the model server", do=_freeze_stub),
    Fault(name="empty the broker", do=_flush, loses=True),
    Fault(name="empty the broker 20 times", do=_flush_again_and_again, loses=True),
    Fault(name="restart postgres", do=_terminate("postgres"), loses=True),
    Fault(name="restart valkey", do=_terminate("valkey"), loses=True),
    Fault(name="end all database sessions", do=_break_sessions, loses=True),
)
