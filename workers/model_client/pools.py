"""Pools of connections, which follow a host's name to where it leads.

Of a busy server a connection is used again before it ever idles, so that one to an address that
its name has left would be used for ever. While a pool is in use, its name is looked up again every
few seconds, beside the calls; once an address that it was given is gone, a new pool takes its
place, and calls that run end on the old one.

Servers that are named by number share one pool. Where the name cannot be looked up, what was known
of it stays.
"""

import asyncio
import socket
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

FOLLOW_S = 5.0
"""Between two look-ups of a name that is in use."""
CONNECT_S = 5.0
IDLE_S = 4.0
"""We close connections that idle for longer; uvicorn, the shortest we know, does so after 5 s."""
MAX_POOLS = 256
"""Names come and go with the models that are registered."""

PER_REQUEST = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
"""The total limit is the caller's: one timer over the request, its repeat and the reading."""


class Pools:
    """The connections of one event loop: no proxies of the environment, no cookies."""

    def __init__(
        self,
        *,
        max_connections: int,
        max_connections_per_host: int,
        resolver: AbstractResolver | None = None,
        follow_s: float = FOLLOW_S,
    ) -> None:
        self._max_connections = max_connections
        self._max_connections_per_host = max_connections_per_host
        self._resolver = resolver
        self._follow_s = follow_s
        self._pools: dict[str, _Pool] = {}
        self._left: set[_Pool] = set()
        """Those that are not closed yet, as a rule because calls still run."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._fresh: aiohttp.ClientSession | None = None

    @contextmanager
    def session(self, host: str) -> Iterator[aiohttp.ClientSession]:
        """Give the connections to a host for one request."""
        pool = self._pool(host)
        pool.calls += 1
        try:
            yield pool.session
        finally:
            pool.calls -= 1
            if not pool.calls and pool in self._left:
                self._spawn(self._end(pool))

    def fresh(self) -> aiohttp.ClientSession:
        """Return connections that are made anew for each request."""
        if self._fresh is None:
            self._fresh = self._session(self._resolver or aiohttp.ThreadedResolver(), fresh=True)
        return self._fresh

    async def close(self) -> None:
        """Close all connections; requests still running end as lost."""
        pools = [*self._pools.values(), *self._left]
        self._pools, self._left = {}, set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in pools:
            await pool.session.close()
        if self._fresh is not None:
            await self._fresh.close()
            self._fresh = None

    def _pool(self, host: str) -> "_Pool":
        named = not _is_numeric(host)
        key = host if named else ""
        pool = self._pools.get(key)
        if pool is None:
            if len(self._pools) >= MAX_POOLS:
                for each in list(self._pools):
                    self._leave(each)
            # Sessions belong to the loop that runs when they are made.
            names = _Names(self._resolver or aiohttp.ThreadedResolver())
            pool = self._pools[key] = _Pool(self._session(names), names)
        due = time.monotonic() - pool.looked_at >= self._follow_s
        if named and due and not pool.is_looking:
            pool.looked_at, pool.is_looking = time.monotonic(), True
            self._spawn(self._follow(host, pool))
        return pool

    async def _follow(self, host: str, pool: "_Pool") -> None:
        """Look a name up; leave its pool if it has left an address that the pool was given."""
        try:
            await pool.names.resolve(host, family=socket.AF_UNSPEC)
        except (OSError, UnicodeError):  # the second: it cannot be a name
            return
        finally:
            pool.is_looking = False
        if pool.names.moved and self._pools.get(host) is pool:
            self._leave(host)

    def _leave(self, key: str) -> None:
        pool = self._pools.pop(key)
        self._left.add(pool)
        if not pool.calls:
            self._spawn(self._end(pool))

    async def _end(self, pool: "_Pool") -> None:
        await pool.session.close()
        self._left.discard(pool)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _session(self, resolver: AbstractResolver, *, fresh: bool = False) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=self._max_connections,
            limit_per_host=self._max_connections_per_host,
            resolver=resolver,
            keepalive_timeout=None if fresh else IDLE_S,
            force_close=fresh,
            use_dns_cache=not fresh,
            ttl_dns_cache=int(FOLLOW_S),
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=PER_REQUEST,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # it knows no bound; see wire.unpack()
            trust_env=False,
        )


@lru_cache(4 * MAX_POOLS)
def _is_numeric(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class _Names(AbstractResolver):
    """Looks names up for a pool, and remembers where they led."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver
        self._given: set[str] = set()
        self.moved = False
        """Whether an address that the pool was given is gone."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        addresses = {result["host"] for result in found}
        self.moved = self.moved or not self._given <= addresses
        self._given |= addresses
        return found

    async def close(self) -> None:
        """Leave the resolver to those who share it."""


class _Pool:
    """Connections to one name, or to all servers that are named by number."""

    def __init__(self, session: aiohttp.ClientSession, names: _Names) -> None:
        self.session, self.names = session, names
        self.calls = 0
        self.looked_at = time.monotonic()
        self.is_looking = False
        """Where names are answered slowly or not at all, look-ups must not pile up."""
