"""Sends requests and reads replies within bounds; knows HTTP, but not what it is used for.

A connection that breaks before any byte of the reply is replaced once, at once: servers close idle
connections just as we use them. So a server that dies of a request gets it twice; rating
a row twice harms nobody.
"""

import asyncio
import errno
import zlib
from dataclasses import dataclass

import aiohttp
from yarl import URL

from workers.model_client.endpoint import Target
from workers.model_client.outcomes import CallOutcome, Verdict
from workers.model_client.pools import Pools

MAX_ANSWER_BYTES = 8 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
ERROR_BODY_S = 2.0
"""How long we listen to a server that explains a refusal; the status is known already."""

TOO_LARGE = Verdict(
    outcome=CallOutcome.INCOMPLETE,
    code="response_too_large",
    detail=f"more than {MAX_ANSWER_BYTES} bytes",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A status and its body: whole for a 200, for others as much as we cared to read."""

    status: int
    retry_after: str | None
    body: bytes


class _NothingCame(Exception):
    """The connection broke before a reply was seen.

    After a reset nobody can tell whether the beginning of its head had come; a repeat is harmless.
    """


class Wire:
    """Requests over the connections of one event loop; no redirect is followed."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def post(self, url: URL, target: Target, body: bytes) -> Reply | Verdict:
        return await self._request("POST", url, target, body)

    async def get(self, url: URL, target: Target) -> Reply | Verdict:
        return await self._request("GET", url, target, None)

    async def close(self) -> None:
        await self._pools.close()

    async def _request(
        self, method: str, url: URL, target: Target, body: bytes | None
    ) -> Reply | Verdict:
        try:
            with self._pools.session(url.host or "") as session:
                return await _exchange(session, method, url, target, body)
        except _NothingCame:
            pass
        try:
            repeated = await _exchange(self._pools.fresh(), method, url, target, body)
        except _NothingCame:
            return _lost("twice before any answer")
        if isinstance(repeated, Verdict) and repeated.outcome is CallOutcome.WARMING:
            return _lost("and refused after that: the server went away during the call")
        return repeated


def unpack(body: bytes | bytearray, encoding: str) -> bytes | None:
    """Return the body without its content encoding, None where it grows too large.

    We ask for none, so this is rarely called. Raise zlib.error for a broken or unknown one.
    """
    if encoding not in {"gzip", "x-gzip", "deflate"}:
        raise zlib.error(f"unknown encoding {encoding[:20]!r}")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # finds out gzip or zlib by itself
    plain = unpacker.decompress(body, MAX_ANSWER_BYTES + 1)
    if not unpacker.eof and len(plain) <= MAX_ANSWER_BYTES:
        raise zlib.error("cut short")
    return plain if len(plain) <= MAX_ANSWER_BYTES else None


async def _exchange(
    session: aiohttp.ClientSession, method: str, url: URL, target: Target, body: bytes | None
) -> Reply | Verdict:
    """Send one request once; raise _NothingCame where a repeat may help and cannot harm."""
    try:
        response = await session.request(
            method, url, data=body, headers=target.headers, allow_redirects=False
        )
    except aiohttp.ClientConnectorError as failure:
        return _unreachable(failure)
    except aiohttp.ServerTimeoutError:
        return Verdict(outcome=CallOutcome.OVERLOAD, code="connect_timeout")
    except aiohttp.ServerDisconnectedError as failure:
        if not isinstance(failure.args[0], str):  # it holds the beginning of a reply
            return _lost("within the head of the answer")
        raise _NothingCame from failure
    except aiohttp.ClientOSError as failure:
        raise _NothingCame from failure
    except (aiohttp.ClientError, ValueError) as failure:
        return Verdict(
            outcome=CallOutcome.TRANSIENT,
            code="protocol_error",
            detail=f"the answer is no HTTP ({type(failure).__name__})",
        )
    try:
        return await (_read_answer if response.status == 200 else _read_refusal)(response)
    except (aiohttp.ClientError, OSError):
        return _lost("in the middle of the answer")
    finally:
        response.release()  # closes the connection unless the body was read to its end


async def _read_answer(response: aiohttp.ClientResponse) -> Reply | Verdict:
    body = bytearray()
    if (response.content_length or 0) > MAX_ANSWER_BYTES:
        return TOO_LARGE
    await _read_into(body, response, MAX_ANSWER_BYTES)
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    plain: bytes | None = bytes(body)
    if encoding != "identity" and len(body) <= MAX_ANSWER_BYTES:
        try:
            plain = unpack(body, encoding)
        except zlib.error as failure:
            return Verdict(
                outcome=CallOutcome.INCOMPLETE, code="bad_answer", detail=f"encoding: {failure}"
            )
    if plain is None or len(plain) > MAX_ANSWER_BYTES:
        return TOO_LARGE
    return Reply(status=200, retry_after=None, body=plain)


async def _read_refusal(response: aiohttp.ClientResponse) -> Reply:
    body = bytearray()
    try:
        async with asyncio.timeout(ERROR_BODY_S):
            await _read_into(body, response, MAX_ERROR_BYTES)
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass  # the status says enough
    return Reply(
        status=response.status, retry_after=response.headers.get("Retry-After"), body=bytes(body)
    )


async def _read_into(body: bytearray, response: aiohttp.ClientResponse, limit: int) -> None:
    """Append what comes until the end or until there is more than the limit."""
    # All of a short answer is here with its head.
    while len(body) <= limit and not response.content.at_eof():
        body += await response.content.readany()


def _unreachable(failure: aiohttp.ClientConnectorError) -> Verdict:
    if isinstance(failure, aiohttp.ClientConnectorCertificateError):
        return Verdict(outcome=CallOutcome.PAUSE, code="certificate_invalid")
    if isinstance(failure, aiohttp.ClientConnectorDNSError):
        return Verdict(outcome=CallOutcome.TRANSIENT, code="name_not_resolved")
    if failure.os_error.errno == errno.ECONNREFUSED:
        return Verdict(outcome=CallOutcome.WARMING, code="connection_refused")
    return Verdict(outcome=CallOutcome.TRANSIENT, code="connect_failed")


def _lost(when: str) -> Verdict:
    return Verdict(outcome=CallOutcome.TRANSIENT, code="connection_lost", detail=when)
