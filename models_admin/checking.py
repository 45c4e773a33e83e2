"""Asks the servers of external models how they are, all at once and within seconds.

Addresses are the operator's, answers anybody's: no redirect is followed, no proxy of the
environment is used, no more of a body is read than a list of models may have, and no server can
hold up the others. What the answers mean is in `policy.health`.
"""

import asyncio
import errno
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import quote

import aiohttp
from yarl import URL

from models_admin.models import Protocol
from models_admin.policy.health import Finding, Reply, of_oip, of_openai

ANSWER_S: Final = 5.0
"""For a whole answer, from looking up the name to the last byte."""
MOST_AT_ONCE: Final = 64
"""Models; each is asked two or three questions."""
LONGEST_BODY_BYTES: Final = 1024 * 1024
"""A hosted service lists hundreds of models."""
RESOLVERS: Final = 32
SHORTEST_SECRET: Final = 6
"""Shorter header values are words like `1` or `true`."""

_OURS: Final = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "airs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A model to ask for."""

    id: str
    protocol: str
    endpoint: str = ""
    """By which it scores pairs, if it does."""
    url: str
    model_name: str
    headers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What was found of a model, and how long its server took."""

    finding: Finding
    latency_s: float


def check(targets: Sequence[Target], *, answer_s: float = ANSWER_S) -> Mapping[str, Checked]:
    """Ask for all models and return what was found of each, by its id.

    Takes `answer_s` for every 64 of which some server does not answer.
    """
    # Not asyncio.run, which waits for look-ups of names that nobody answers.
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(RESOLVERS, thread_name_prefix="look-up"))
    try:
        return loop.run_until_complete(_check(targets, answer_s))
    finally:
        loop.close()


async def _check(targets: Sequence[Target], answer_s: float) -> Mapping[str, Checked]:
    places = asyncio.Semaphore(MOST_AT_ONCE)
    connector = aiohttp.TCPConnector(limit=0, force_close=True, resolver=aiohttp.ThreadedResolver())
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=answer_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    ) as session:

        async def of(target: Target) -> Checked:
            async with places:
                began = time.monotonic()
                finding = await _find(session, target, answer_s)
                return Checked(finding=finding, latency_s=time.monotonic() - began)

        found = await asyncio.gather(*map(of, targets))
    return {target.id: checked for target, checked in zip(targets, found, strict=True)}


async def _find(session: aiohttp.ClientSession, target: Target, answer_s: float) -> Finding:
    return _redacted(await _ask_for(session, target, answer_s), target.headers.values())


def _redacted(finding: Finding, sent: Iterable[str]) -> Finding:
    """Return what was found without what we sent: a server may name its model by our key."""
    secrets = _secrets(sent)
    detail = finding.detail
    for secret in secrets:
        detail = detail.replace(secret, "***")
    return replace(finding, detail=detail, version=_without(secrets, finding.version))


def unsaid(version: str, sent: Iterable[str]) -> str:
    """Return what a server calls a model, "" where it repeats a header's value that we sent."""
    return _without(_secrets(sent), version)


def _without(secrets: Iterable[str], version: str) -> str:
    return "" if any(secret in version for secret in secrets) else version


def _secrets(sent: Iterable[str]) -> list[str]:
    """Return what of the headers' values must not be repeated, the longest first."""
    secrets = {part for value in sent for part in (value, value.partition(" ")[2])}
    return sorted((s for s in secrets if len(s) >= SHORTEST_SECRET), key=len, reverse=True)


async def _ask_for(session: aiohttp.ClientSession, target: Target, answer_s: float) -> Finding:
    root, name = target.url.rstrip("/"), target.model_name

    async def ask(path: str) -> Reply:
        return await _ask(session, f"{root}{path}", target.headers, answer_s)

    if target.protocol == Protocol.OIP:
        model = f"/v2/models/{quote(name, safe='')}"
        replies = await asyncio.gather(ask("/v2/health/ready"), ask(f"{model}/ready"), ask(model))
        return of_oip(*replies, name=name)
    root = root.removesuffix("/v1")
    if target.endpoint:  # behind /v2, hosted services rank; their models are listed behind /v1
        root = root.removesuffix("/v2")
    models, health = await asyncio.gather(ask("/v1/models"), ask("/health"))
    return of_openai(models, health, name=name, scores=bool(target.endpoint))


async def _ask(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], answer_s: float
) -> Reply:
    try:
        async with session.get(
            URL(url, encoded=True), headers={**_OURS, **headers}, allow_redirects=False
        ) as response:
            return Reply(status=response.status, body=await _body(response))
    except TimeoutError:
        return Reply(fault=f"no whole answer within {answer_s:g} s")
    except aiohttp.ClientConnectorCertificateError:
        return Reply(fault="its certificate is not valid")
    except aiohttp.ClientConnectorDNSError:
        return Reply(fault="the name of its host does not resolve")
    except aiohttp.ClientConnectorError as failure:
        refused = failure.os_error.errno == errno.ECONNREFUSED
        return Reply(fault="connection refused" if refused else "no connection")
    except (aiohttp.ClientError, OSError, ValueError) as failure:
        return Reply(fault=f"no answer that is HTTP ({type(failure).__name__})")


async def _body(response: aiohttp.ClientResponse) -> Mapping[str, object]:
    """Return the JSON object of an answer; empty where there is none, or it is too long."""
    data = bytearray()
    while not response.content.at_eof():
        data += await response.content.readany()
        if len(data) > LONGEST_BODY_BYTES:
            response.close()
            return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
