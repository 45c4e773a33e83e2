"""Sends to addresses that users name: to public ones only, without ever reading an answer.

The URL is judged when it is registered and again before each request; a name is looked up once a
request, each address it leads to is judged, and the connection goes to one of just those: a name
that changes its mind in between gains nothing. TLS is checked against the name. No redirect is
followed, no proxy of the environment used, no cookie kept, and of an answer only its status and
Retry-After are looked at.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooSlow
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from django.conf import settings
from yarl import URL

from fulfillment.policy.addresses import (
    NOT_PUBLIC,
    Allowed,
    Refusal,
    Target,
    allowed_from,
    may_connect,
    read_target,
)
from fulfillment.policy.delivery import NOT_ALLOWED, Answer

logger = logging.getLogger(__name__)

LIMIT_S: Final = 10.0
"""Of a whole attempt, from the look-up of the name to the head of the answer."""
LOOK_UP_S: Final = 2.0
"""What registering waits for a name; one that takes longer is judged when it is sent to."""
USER_AGENT: Final = "AIRS-Webhooks/1"

LookUp = Callable[[str, int], Sequence[str]]
"""Returns the numeric addresses of a host; raises OSError."""

T = TypeVar("T")


def addresses_of(host: str, port: int) -> Sequence[str]:
    """Look a name up as the system does."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def allowed() -> Allowed:
    """Return what the operator allows besides public hosts."""
    return allowed_from(settings.AIRS_ALLOWED_PRIVATE_HOSTS)


def judge(url: str, *, look_up: LookUp | None = None) -> Target | Refusal:
    """Return the parts of a URL, or why nothing may be sent to it.

    A name that cannot be looked up now is let pass: it is looked up again at each request.
    """
    rules = allowed()
    target = read_target(url, allowed=rules, ports=settings.AIRS_WEBHOOK_PORTS)
    if isinstance(target, Refusal):
        return target
    with contextlib.suppress(OSError, TooSlow):
        looked_up = _look_ups().submit(look_up or addresses_of, target.host, target.port)
        if not all(may_connect(target, a, allowed=rules) for a in looked_up.result(LOOK_UP_S)):
            return NOT_PUBLIC
    return target


@cache
def _look_ups() -> ThreadPoolExecutor:
    # A look-up cannot be broken off. Few threads: slow names keep each other waiting, nobody else.
    return ThreadPoolExecutor(4, thread_name_prefix="look-up")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt(Generic[T]):
    """What came of sending for `token`, and the seconds that it took."""

    token: T
    answer: Answer
    duration_s: float
    retry_after: str | None = None
    """The header as it came."""


class Sending(Generic[T]):
    """Sends many requests at a time, on an event loop in a thread of its own.

    The thread of the caller keeps its database connection to itself: it starts requests and takes
    what has ended. `capacity` is the number of requests at a time that the caller keeps to.
    """

    def __init__(self, *, capacity: int, look_up: LookUp | None = None) -> None:
        self.in_flight = 0
        self._capacity = capacity
        self._look_up = look_up or addresses_of
        self._ended: SimpleQueue[Attempt[T]] = SimpleQueue()

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        # Look-ups block a thread each, as long as a name server likes: as many as requests.
        self._threads = ThreadPoolExecutor(self._capacity, thread_name_prefix="look-up")
        self._loop.set_default_executor(self._threads)
        self._thread = threading.Thread(target=self._loop.run_forever, name="sending", daemon=True)
        self._thread.start()
        self._rules = allowed()
        self._session = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def post(self, token: T, *, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Begin to send; `ended` gives the token back with what came of it."""
        self.in_flight += 1
        asyncio.run_coroutine_threadsafe(self._attempt(token, url, body, headers), self._loop)

    def ended(self, *, timeout_s: float) -> list[Attempt[T]]:
        """Wait for an attempt to end; return all that have, none after `timeout_s`."""
        found: list[Attempt[T]] = []
        with contextlib.suppress(Empty):
            found.append(self._ended.get(timeout=timeout_s))
            while True:
                found.append(self._ended.get_nowait())
        self.in_flight -= len(found)
        return found

    async def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,
            force_close=True,
            use_dns_cache=False,
            resolver=_CheckedResolver(self._rules, self._look_up),
        )
        return aiohttp.ClientSession(
            connector=connector,
            # The whole attempt has a limit of its own.
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    async def _attempt(self, token: T, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        started = asyncio.get_running_loop().time()
        retry_after = None
        try:
            async with asyncio.timeout(LIMIT_S):
                answer, retry_after = await self._exchange(url, body, headers)
        except TimeoutError:
            answer = Answer(code="timeout")
        except Exception:  # the caller waits for each attempt, whatever becomes of it
            logger.exception("sending failed")
            answer = Answer(code="internal_error")
        duration_s = asyncio.get_running_loop().time() - started
        self._ended.put(
            Attempt(token=token, answer=answer, duration_s=duration_s, retry_after=retry_after)
        )

    async def _exchange(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[Answer, str | None]:
        target = read_target(url, allowed=self._rules, ports=settings.AIRS_WEBHOOK_PORTS)
        if isinstance(target, Refusal):
            return Answer(code=NOT_ALLOWED), None
        try:
            response = await self._session.post(
                _address(target),
                data=body,
                headers={"User-Agent": USER_AGENT, **headers},
                allow_redirects=False,
            )
        except aiohttp.ClientError as failure:
            return Answer(code=_code(failure)), None
        # Its body is never read: whatever it says is nobody's business but the receiver's.
        response.close()
        return Answer(status=response.status), response.headers.get("Retry-After")


class _NotAllowed(OSError):
    """A name leads to an address that may not be sent to."""


class _CheckedResolver(AbstractResolver):
    """Looks names up and returns their addresses, if all of them may be sent to."""

    def __init__(self, rules: Allowed, look_up: LookUp) -> None:
        self._rules, self._look_up = rules, look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, self._look_up, host, port)
        target = Target(scheme="", host=host, port=port, path="", query="")
        if not all(may_connect(target, address, allowed=self._rules) for address in found):
            raise _NotAllowed
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=_family(address),
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in dict.fromkeys(found)
        ]

    async def close(self) -> None:
        """Hold nothing."""


def _family(address: str) -> int:
    numeric = ipaddress.ip_address(address)
    return socket.AF_INET if numeric.version == 4 else socket.AF_INET6


def _address(target: Target) -> URL:
    return URL.build(
        scheme=target.scheme,
        host=f"[{target.host}]" if ":" in target.host else target.host,
        port=target.port,
        path=target.path,
        query_string=target.query,
        encoded=True,
    )


def _code(failure: aiohttp.ClientError) -> str:
    """Return a word for what kept an answer from coming; none of them is the receiver's."""
    if isinstance(failure, aiohttp.ClientConnectorDNSError):
        refused = isinstance(failure.os_error, _NotAllowed)
        return NOT_ALLOWED if refused else "name_not_resolved"
    if isinstance(failure, aiohttp.ClientSSLError):
        return "tls_failed"
    if isinstance(failure, aiohttp.ClientConnectorError):
        refused = isinstance(failure.os_error, ConnectionRefusedError)
        return "connection_refused" if refused else "connection_failed"
    if isinstance(failure, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return "connection_lost"
    return "protocol_error"
