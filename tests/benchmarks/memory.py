"""Private memory of a stack's processes while something runs, and whether it grows with it.

Private is what a process has for itself: neither PostgreSQL's shared buffers nor pages that it has
had in common with its parent since a fork. A role is a supervised process with its children;
PostgreSQL's backends are one of their own, as its vacuum workers come and go.
"""

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil
import redis

from tests.acceptance.stack import Stack
from tests.benchmarks.costs import SUPERVISOR, supervised
from tests.benchmarks.report import Figure, number

EVERY_S = 0.5
EARLY, LATE = 0.1, 0.9
MIB = 2**20
BACKENDS, CLIENT = "postgres_backends", "[local]"
VALKEY_DATA = "valkey_data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The memory of each role when so much was done."""

    done: float
    mib: Mapping[str, float]


@contextlib.contextmanager
def watching(stack: Stack, done: Callable[[], float] = lambda: 0.0) -> Iterator[list[Look]]:
    """Look at a stack again and again within a block; `done` says which share of it is over."""
    looks = [Look(done=done(), mib=look(stack))]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            looks.append(Look(done=done(), mib=look(stack)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()
        looks.append(Look(done=done(), mib=look(stack)))


def look(stack: Stack) -> dict[str, float]:
    """Return MiB by role now, and what Valkey says that its data takes."""
    found: dict[str, float] = defaultdict(float)
    for role, process in supervised(stack.home):
        family = [] if role == SUPERVISOR else process.children(recursive=True)
        for member in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                is_backend = CLIENT in " ".join(member.cmdline())
                found[BACKENDS if is_backend else role] += member.memory_full_info().uss / MIB
    servers = json.loads((stack.home / "run" / "servers.json").read_text())
    with redis.Redis.from_url(servers["redis_url"]) as valkey:
        found[VALKEY_DATA] = valkey.info("memory")["used_memory"] / MIB
    return dict(found)


def peak(looks: Sequence[Look], role: str) -> float:
    """Return how many MiB a role grew above its first look, at most."""
    return max(look.mib[role] for look in looks) - looks[0].mib[role]


def growth(looks: Sequence[Look], *, name: str, rows: int) -> Iterator[Figure]:
    """Yield for each role how far its most in the last tenth is above that in the second tenth."""
    begun = [look for look in looks if look.done >= EARLY]
    early = [look.mib for look in begun if look.done < 2 * EARLY] or [begun[0].mib]
    late = [look.mib for look in looks if look.done >= LATE]
    for role in sorted(early[0]):
        before, after = (max(mib.get(role, 0.0) for mib in of) for of in (early, late))
        yield Figure(
            name=f"{name}_{role}_growth_mib",
            value=after - before,
            unit="MiB",
            ratio_to="its level at the end: the level between 10 and 20 % over it",
            ratio=before / after,
            n=rows,
            note=f"{number(before)} MiB between 10 and 20 %, {number(after)} in the last tenth,"
            f" {number(max(look.mib.get(role, 0.0) for look in looks))} at most;"
            f" {len(early)} and {len(late)} looks",
        )
