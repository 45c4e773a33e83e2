"""`Client` and `AsyncClient`: the calls of `calls`, sent over HTTP with retries.

Both are thin: how a request is built, how an answer is read and when to try again is decided in
`calls` and `retries`; here is only what differs between blocking and awaiting.
"""

import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Self, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx

from airs_client import calls
from airs_client.calls import Call, Reply, ResultFormat
from airs_client.connection import Connection, resolve
from airs_client.errors import AirsError, Unreachable, WaitTimedOut, WorkflowNotCompleted
from airs_client.results import Model, Page, Rater, Rating, RatingsPage, Submission, Workflow
from airs_client.retries import Retries, retry_after_s
from airs_client.uploads import Format, Rows, Upload, open_upload

T = TypeVar("T")
Source = str | os.PathLike[str] | IO[bytes] | Rows
OnRetry = Callable[[AirsError, float], None]
OnProgress = Callable[[Workflow], None]

_UPLOAD_ANSWER_S = 1800.0
"""An upload is answered when all of its rows are in the database, which takes its time."""

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class _Workflows:
    def __init__(self, client: "Client") -> None:
        self._do = client.do

    def submit(
        self,
        source: Source,
        *,
        rater: str,
        name: str | None = None,
        priority: int | None = None,
        deadline: timedelta | None = None,
        max_duration: timedelta | None = None,
        complete_when: float | None = None,
        batch_size: int | None = None,
        bypass: bool = False,
        format: Format | None = None,
        idempotency_key: str | None = None,
    ) -> Submission:
        """Send rows (a path, a binary stream, or mappings) as a new, closed workflow.

        The same rows with the same arguments are one workflow, however often they are sent within
        a day; pass another `idempotency_key` or `name` to have them rated as another one.
        `bypass` takes no rating that the archive had before.
        """
        with open_upload(source, format=format) as upload:
            call = calls.submit(
                upload,
                rater=rater,
                name=name,
                priority=priority,
                deadline=deadline,
                max_duration=max_duration,
                complete_when=complete_when,
                batch_size=batch_size,
                bypass=bypass,
                idempotency_key=idempotency_key,
            )
            return self._do(call)

    def get(self, workflow_id: str) -> Workflow:
        return self._do(calls.workflow(workflow_id))

    def list(
        self, *, state: str | None = None, rater: str | None = None, cursor: str | None = None
    ) -> Page[Workflow]:
        return self._do(calls.workflows(state=state, rater=rater, cursor=cursor))

    def cancel(self, workflow_id: str) -> Workflow:
        return self._do(calls.cancel(workflow_id))

    def wait(
        self,
        workflow_id: str,
        *,
        timeout: timedelta | None = None,
        on_progress: OnProgress | None = None,
        check: bool = False,
    ) -> Workflow:
        """Block until the workflow has ended. With `check`, other ends than COMPLETED raise."""
        started_s = time.monotonic()
        delays_s = poll_delays_s()
        while True:
            workflow = self.get(workflow_id)
            if on_progress:
                on_progress(workflow)
            if workflow.finished:
                return _checked(workflow, check=check)
            _give_up_if_late(workflow, timeout, time.monotonic() - started_s)
            time.sleep(next(delays_s))

    def ratings(self, workflow_id: str, *, state: str | None = None) -> Iterator[Rating]:
        """All records in input order, page by page; works while the workflow runs."""
        for page in self.rating_pages(workflow_id, state=state):
            yield from calls.ratings_in(page)

    def rating_pages(
        self, workflow_id: str, *, format: ResultFormat = "jsonl", state: str | None = None
    ) -> Iterator[RatingsPage]:
        """The same as bytes: the pages put together are one file."""
        cursor = None
        while True:
            page = self._do(
                calls.ratings_page(workflow_id, format=format, state=state, cursor=cursor)
            )
            yield page
            if (cursor := page.next) is None:
                return


class _Raters:
    def __init__(self, client: "Client") -> None:
        self._do = client.do

    def list(self, *, cursor: str | None = None) -> Page[Rater]:
        return self._do(calls.raters(cursor=cursor))

    def get(self, rater_id: str) -> Rater:
        return self._do(calls.rater(rater_id))


class _Models:
    def __init__(self, client: "Client") -> None:
        self._do = client.do

    def list(self, *, cursor: str | None = None) -> Page[Model]:
        return self._do(calls.models(cursor=cursor))

    def get(self, model_id: str) -> Model:
        return self._do(calls.model(model_id))


class Client:
    """Talks to one AIRS server. Use it in a `with` statement, or `close` it."""

    def __init__(
        self,
        base_url: str | None = None,
        token: str | None = None,
        *,
        profile: str | None = None,
        timeout_s: float = 30.0,
        retries: Retries | None = None,
        on_retry: OnRetry | None = None,
    ) -> None:
        """Address and token not given are looked up as the `airs` command does (`connection`)."""
        self.connection = _connection(base_url, token, profile)
        self._http = httpx.Client(**_http_options(self.connection, timeout_s))
        self._retries = retries or Retries()
        self._on_retry = on_retry
        self.workflows = _Workflows(self)
        self.raters = _Raters(self)
        self.models = _Models(self)

    def do(self, call: Call[T]) -> T:
        """Make one call of `calls`, again if that may help."""
        attempt = 0
        while True:
            try:
                return calls.outcome(call, self._exchange(call))
            except AirsError as failure:
                delay_s = _delay_s(self._retries, failure, call, attempt)
                if delay_s is None:
                    raise
                if self._on_retry:
                    self._on_retry(failure, delay_s)
            time.sleep(delay_s)
            attempt += 1

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, call: Call[Any]) -> Reply:
        options = _request_options(call, self._http.timeout)
        content = call.upload.chunks() if call.upload else None
        try:
            return _reply(self._http.request(content=content, **options))
        except httpx.HTTPError as error:
            raise _unreachable(self.connection, error) from error


class _AsyncWorkflows:
    def __init__(self, client: "AsyncClient") -> None:
        self._do = client.do

    async def submit(
        self,
        source: Source,
        *,
        rater: str,
        name: str | None = None,
        priority: int | None = None,
        deadline: timedelta | None = None,
        max_duration: timedelta | None = None,
        complete_when: float | None = None,
        batch_size: int | None = None,
        bypass: bool = False,
        format: Format | None = None,
        idempotency_key: str | None = None,
    ) -> Submission:
        """As `Client.workflows.submit`; files are read in a thread."""
        with await _opened_in_thread(source, format) as upload:
            call = calls.submit(
                upload,
                rater=rater,
                name=name,
                priority=priority,
                deadline=deadline,
                max_duration=max_duration,
                complete_when=complete_when,
                batch_size=batch_size,
                bypass=bypass,
                idempotency_key=idempotency_key,
            )
            return await self._do(call)

    async def get(self, workflow_id: str) -> Workflow:
        return await self._do(calls.workflow(workflow_id))

    async def list(
        self, *, state: str | None = None, rater: str | None = None, cursor: str | None = None
    ) -> Page[Workflow]:
        return await self._do(calls.workflows(state=state, rater=rater, cursor=cursor))

    async def cancel(self, workflow_id: str) -> Workflow:
        return await self._do(calls.cancel(workflow_id))

    async def wait(
        self,
        workflow_id: str,
        *,
        timeout: timedelta | None = None,
        on_progress: OnProgress | None = None,
        check: bool = False,
    ) -> Workflow:
        started_s = time.monotonic()
        delays_s = poll_delays_s()
        while True:
            workflow = await self.get(workflow_id)
            if on_progress:
                on_progress(workflow)
            if workflow.finished:
                return _checked(workflow, check=check)
            _give_up_if_late(workflow, timeout, time.monotonic() - started_s)
            await anyio.sleep(next(delays_s))

    async def ratings(self, workflow_id: str, *, state: str | None = None) -> AsyncIterator[Rating]:
        async for page in self.rating_pages(workflow_id, state=state):
            for rating in calls.ratings_in(page):
                yield rating

    async def rating_pages(
        self, workflow_id: str, *, format: ResultFormat = "jsonl", state: str | None = None
    ) -> AsyncIterator[RatingsPage]:
        cursor = None
        while True:
            page = await self._do(
                calls.ratings_page(workflow_id, format=format, state=state, cursor=cursor)
            )
            yield page
            if (cursor := page.next) is None:
                return


class _AsyncRaters:
    def __init__(self, client: "AsyncClient") -> None:
        self._do = client.do

    async def list(self, *, cursor: str | None = None) -> Page[Rater]:
        return await self._do(calls.raters(cursor=cursor))

    async def get(self, rater_id: str) -> Rater:
        return await self._do(calls.rater(rater_id))


class _AsyncModels:
    def __init__(self, client: "AsyncClient") -> None:
        self._do = client.do

    async def list(self, *, cursor: str | None = None) -> Page[Model]:
        return await self._do(calls.models(cursor=cursor))

    async def get(self, model_id: str) -> Model:
        return await self._do(calls.model(model_id))


class AsyncClient:
    """`Client` with calls to await. Use it in an `async with` statement, or `aclose` it."""

    def __init__(
        self,
        base_url: str | None = None,
        token: str | None = None,
        *,
        profile: str | None = None,
        timeout_s: float = 30.0,
        retries: Retries | None = None,
        on_retry: OnRetry | None = None,
    ) -> None:
        self.connection = _connection(base_url, token, profile)
        self._http = httpx.AsyncClient(**_http_options(self.connection, timeout_s))
        self._retries = retries or Retries()
        self._on_retry = on_retry
        self.workflows = _AsyncWorkflows(self)
        self.raters = _AsyncRaters(self)
        self.models = _AsyncModels(self)

    async def do(self, call: Call[T]) -> T:
        attempt = 0
        while True:
            try:
                return calls.outcome(call, await self._exchange(call))
            except AirsError as failure:
                delay_s = _delay_s(self._retries, failure, call, attempt)
                if delay_s is None:
                    raise
                if self._on_retry:
                    self._on_retry(failure, delay_s)
            await anyio.sleep(delay_s)
            attempt += 1

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _exchange(self, call: Call[Any]) -> Reply:
        options = _request_options(call, self._http.timeout)
        content = _chunks_from_thread(call.upload) if call.upload else None
        try:
            return _reply(await self._http.request(content=content, **options))
        except httpx.HTTPError as error:
            raise _unreachable(self.connection, error) from error


def poll_delays_s() -> Iterator[float]:
    """Pauses between two looks at a workflow: short ones end soon, long ones are not pestered."""
    delay_s = 0.2
    while True:
        yield delay_s
        delay_s = min(2.0, delay_s * 1.4)


def _checked(workflow: Workflow, *, check: bool) -> Workflow:
    if check and workflow.state != "COMPLETED":
        raise WorkflowNotCompleted(workflow)
    return workflow


def _give_up_if_late(workflow: Workflow, timeout: timedelta | None, waited_s: float) -> None:
    if timeout is not None and waited_s >= timeout.total_seconds():
        raise WaitTimedOut(workflow, timeout.total_seconds())


def _connection(base_url: str | None, token: str | None, profile: str | None) -> Connection:
    return resolve(
        url=base_url,
        token=token,
        profile=profile,
        environ=os.environ,
        home=Path.home(),
        directory=Path(),
    )


def _http_options(connection: Connection, timeout_s: float) -> dict[str, Any]:
    token, address = connection.token, urlsplit(connection.url)
    return {
        "base_url": connection.url,
        "headers": {"Authorization": f"Bearer {token}"} if token else {},
        "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
        # A proxy for the outside world cannot reach a server on this machine.
        "trust_env": address.hostname not in _LOOPBACK,
        # Certificates are always checked; without TLS, loading them would take longer than a call.
        "verify": address.scheme != "http",
    }


def _request_options(call: Call[Any], timeout: httpx.Timeout) -> dict[str, Any]:
    if call.upload:
        timeout = httpx.Timeout(
            connect=timeout.connect, write=timeout.write, pool=timeout.pool, read=_UPLOAD_ANSWER_S
        )
    return {
        "method": call.method,
        "url": call.path,
        "params": call.params,
        "headers": call.headers,
        "timeout": timeout,
    }


def _reply(response: httpx.Response) -> Reply:
    headers = {name.lower(): value for name, value in response.headers.items()}
    now = datetime.now(UTC)
    return Reply(
        status=response.status_code,
        headers=headers,
        body=response.content,
        retry_after_s=retry_after_s(headers.get("retry-after"), now=now),
    )


def _unreachable(connection: Connection, error: httpx.HTTPError) -> Unreachable:
    return Unreachable(connection.url, str(error).rstrip(".") or type(error).__name__)


def _delay_s(retries: Retries, failure: AirsError, call: Call[Any], attempt: int) -> float | None:
    return retries.delay_s(
        failure, repeatable=call.repeatable, attempt=attempt, chance=random.random()
    )


async def _opened_in_thread(source: Source, format: Format | None) -> Upload:
    return await anyio.to_thread.run_sync(lambda: open_upload(source, format=format))


async def _chunks_from_thread(upload: Upload) -> AsyncIterator[bytes]:
    chunks = upload.chunks()
    while (chunk := await anyio.to_thread.run_sync(next, chunks, None)) is not None:
        yield chunk
