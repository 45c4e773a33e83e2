"""`Client` and `AsyncClient`: the calls of `calls`, sent over HTTP with retries.

Both are thin: how a request is built, how an answer is read and when to try again is decided in
`calls` and `retries`; here is only what differs between blocking and awaiting.
"""

import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Self, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx

from airs_client import calls
from airs_client.calls import Call, FileFormat, Rebalancing, Reply, ResultFormat
from airs_client.connection import Connection, resolve
from airs_client.errors import AirsError, Unreachable, WaitTimedOut, WorkflowNotCompleted
from airs_client.results import (
    Decision,
    Distributions,
    Estimate,
    Event,
    Model,
    Page,
    Pool,
    Rater,
    Rating,
    RatingsPage,
    Submission,
    Workflow,
)
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
        self._receive = client.receive

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
        webhook: str | None = None,
        format: Format | None = None,
        idempotency_key: str | None = None,
    ) -> Submission:
        """Send rows (a path, a binary stream, or mappings) as a new, closed workflow.

        The same rows with the same arguments are one workflow, however often they are sent within
        a day; pass another `idempotency_key` or `name` to have them rated as another one.
        `bypass` takes no rating that the archive had before. `webhook` is an address that is told
        of the end; `Submission.webhook` has the secret that signs, unless the server has it by now.
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
                webhook=webhook,
                idempotency_key=idempotency_key,
            )
            return self._do(call)

    def estimate(
        self,
        source: Source,
        *,
        rater: str,
        priority: int | None = None,
        deadline: timedelta | None = None,
        batch_size: int | None = None,
        bypass: bool = False,
        sample_of: int | None = None,
        format: Format | None = None,
    ) -> Estimate:
        """What would become of rows if they were submitted now: hits, calls, ETA, in time or not.

        With `sample_of` they are a part of so many rows, and counts are scaled to these.
        """
        with open_upload(source, format=format) as upload:
            call = calls.estimate(
                upload,
                rater=rater,
                priority=priority,
                deadline=deadline,
                batch_size=batch_size,
                bypass=bypass,
                sample_of=sample_of,
            )
            return self._do(call)

    def get(self, workflow_id: str) -> Workflow:
        return self._do(calls.workflow(workflow_id))

    def list(
        self, *, state: str | None = None, rater: str | None = None, cursor: str | None = None
    ) -> Page[Workflow]:
        return self._do(calls.workflows(state=state, rater=rater, cursor=cursor))

    def events(self, workflow_id: str) -> Sequence[Event]:
        """Return the completion events, one a round, oldest first."""
        return self._do(calls.events(workflow_id)).items

    def close(self, workflow_id: str) -> Workflow:
        return self._do(calls.act(workflow_id, "close"))

    def pause(self, workflow_id: str) -> Workflow:
        """Nothing more is sent until it is resumed; deadlines go on."""
        return self._do(calls.act(workflow_id, "pause"))

    def resume(self, workflow_id: str) -> Workflow:
        return self._do(calls.act(workflow_id, "resume"))

    def cancel(self, workflow_id: str) -> Workflow:
        return self._do(calls.act(workflow_id, "cancel"))

    def complete(self, workflow_id: str) -> Workflow:
        """End it now; what is open is not awaited."""
        return self._do(calls.act(workflow_id, "complete"))

    def retry(self, workflow_id: str, *, idempotency_key: str | None = None) -> Workflow:
        """Have what did not complete rated in a new round, with a fresh deadline."""
        key = idempotency_key or f"airs-{uuid.uuid4().hex}"
        return self._do(calls.retry(workflow_id, idempotency_key=key))

    def change(
        self,
        workflow_id: str,
        *,
        name: str | None = None,
        priority: int | None = None,
        deadline: timedelta | None = None,
    ) -> Workflow:
        """Change what is given; `deadline` counts from when the round was accepted."""
        call = calls.change(workflow_id, name=name, priority=priority, deadline=deadline)
        return self._do(call)

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

    def download(
        self,
        workflow_id: str,
        file: IO[bytes],
        *,
        format: FileFormat = "jsonl",
        state: str | None = None,
    ) -> None:
        """Write all records to a binary file, in the memory of a page whatever their number.

        JSON Lines and CSV go on at the page where a connection broke. Parquet starts again, which
        needs a file that can be rewound.
        """
        if format == "parquet":
            self._receive(calls.ratings_file(workflow_id, format=format, state=state), file)
            return
        for page in self.rating_pages(workflow_id, format=format, state=state):
            file.write(page.content)

    def distributions(self, workflow_id: str) -> Distributions:
        """How long the requests waited and how often they were tried."""
        return self._do(calls.distributions(workflow_id))


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

    def register(self, model_id: str, **settings: Any) -> Model:
        """Register a model; `settings` are named as in `POST /models`."""
        return self._do(calls.register_model({"id": model_id, **settings}))

    def change(self, model_id: str, **changes: Any) -> Model:
        """Change settings; running replicas take them at their next restart."""
        return self._do(calls.change_model(model_id, changes))

    def remove(self, model_id: str) -> None:
        """Remove a model that is not started."""
        self._do(calls.remove_model(model_id))

    def start(self, model_id: str) -> Model:
        """Want its replicas; they come within seconds."""
        return self._do(calls.act_on_model(model_id, "start"))

    def stop(self, model_id: str) -> Model:
        """Drain and end its replicas."""
        return self._do(calls.act_on_model(model_id, "stop"))

    def restart(self, model_id: str) -> Model:
        """Replace its replicas, one at a time while others serve."""
        return self._do(calls.act_on_model(model_id, "restart"))

    def resize(self, model_id: str, replicas: int) -> Model:
        """Want another number of replicas."""
        return self._do(calls.resize_model(model_id, replicas))

    def versions(self, model_id: str) -> Page[Mapping[str, Any]]:
        """List what was seen of its versions, the newest first."""
        return self._do(calls.model_versions(model_id))

    def retire(self, model_id: str, version: str) -> Mapping[str, Any]:
        """End an old version's replicas, whatever work waits for it."""
        return self._do(calls.retire_model_version(model_id, version))

    def try_rows(self, model_id: str, rows: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
        """Ask an OIP model once, with queries and texts; nothing is archived."""
        return self._do(calls.try_model(model_id, rows=rows))

    def try_message(self, model_id: str, message: str) -> Mapping[str, Any]:
        """Ask a chat model once; nothing is archived."""
        return self._do(calls.try_model(model_id, message=message))


class _Pools:
    def __init__(self, client: "Client") -> None:
        self._do = client.do

    def list(self, *, cursor: str | None = None) -> Page[Pool]:
        return self._do(calls.pools(cursor=cursor))

    def get(self, pool_id: str) -> Pool:
        return self._do(calls.pool(pool_id))

    def decisions(self, pool_id: str, *, cursor: str | None = None) -> Page[Decision]:
        """What the rebalancer decided for a pool, the newest first."""
        return self._do(calls.decisions(pool_id, cursor=cursor))

    def rebalance(self, pool_id: str, mode: Rebalancing) -> Pool:
        """Say whether replicas move between the pool's models; `dry_run` only says what would."""
        return self._do(calls.rebalance(pool_id, mode))

    def register(self, pool_id: str, **settings: Any) -> Pool:
        """Register a pool; `settings` are named as in `POST /pools`."""
        return self._do(calls.register_pool({"id": pool_id, **settings}))

    def change(self, pool_id: str, **changes: Any) -> Pool:
        """Change settings of a pool."""
        return self._do(calls.change_pool(pool_id, changes))

    def remove(self, pool_id: str) -> None:
        """Remove a pool that no model belongs to."""
        self._do(calls.remove_pool(pool_id))


class _Archive:
    def __init__(self, client: "Client") -> None:
        self._do = client.do

    def explain(
        self,
        row: Mapping[str, Any],
        *,
        rater: str,
        max_age: timedelta | None = None,
        bypass: bool = False,
    ) -> Mapping[str, Any]:
        """Why a row would hit or miss; nothing is stored."""
        return self._do(calls.explain(row, rater=rater, max_age=max_age, bypass=bypass))

    def purge(
        self,
        *,
        rater: str | None = None,
        version: int | None = None,
        url: str | None = None,
        before: datetime | None = None,
        dry_run: bool = True,
    ) -> Mapping[str, Any]:
        """Count, or with `dry_run=False` erase, what meets all criteria given."""
        return self._do(
            calls.purge(rater=rater, version=version, url=url, before=before, dry_run=dry_run)
        )

    def purge_state(self, purge_id: str) -> Mapping[str, Any]:
        """How far a large purge is."""
        return self._do(calls.purge_state(purge_id))


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
        self.pools = _Pools(self)
        self.archive = _Archive(self)

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

    def receive(self, call: Call[None], file: IO[bytes]) -> None:
        """Write the answer of a call to a file, again from the start if it breaks off."""
        target = _Target(file)
        attempt = 0
        while True:
            try:
                return self._stream(call, target)
            except AirsError as failure:
                delay_s = _delay_s(self._retries, failure, call, attempt)
                if delay_s is None or not target.rewind():
                    raise
                if self._on_retry:
                    self._on_retry(failure, delay_s)
            time.sleep(delay_s)
            attempt += 1

    def _stream(self, call: Call[None], target: "_Target") -> None:
        options = _request_options(call, self._http.timeout)
        try:
            with self._http.stream(**options) as response:
                if response.status_code != 200:
                    response.read()
                    return calls.outcome(call, _reply(response))
                for piece in response.iter_bytes():
                    target.write(piece)
        except httpx.HTTPError as error:
            raise _unreachable(self.connection, error) from error

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
        self._receive = client.receive

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
        webhook: str | None = None,
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
                webhook=webhook,
                idempotency_key=idempotency_key,
            )
            return await self._do(call)

    async def estimate(
        self,
        source: Source,
        *,
        rater: str,
        priority: int | None = None,
        deadline: timedelta | None = None,
        batch_size: int | None = None,
        bypass: bool = False,
        sample_of: int | None = None,
        format: Format | None = None,
    ) -> Estimate:
        """As `Client.workflows.estimate`; files are read in a thread."""
        with await _opened_in_thread(source, format) as upload:
            call = calls.estimate(
                upload,
                rater=rater,
                priority=priority,
                deadline=deadline,
                batch_size=batch_size,
                bypass=bypass,
                sample_of=sample_of,
            )
            return await self._do(call)

    async def get(self, workflow_id: str) -> Workflow:
        return await self._do(calls.workflow(workflow_id))

    async def list(
        self, *, state: str | None = None, rater: str | None = None, cursor: str | None = None
    ) -> Page[Workflow]:
        return await self._do(calls.workflows(state=state, rater=rater, cursor=cursor))

    async def events(self, workflow_id: str) -> Sequence[Event]:
        return (await self._do(calls.events(workflow_id))).items

    async def close(self, workflow_id: str) -> Workflow:
        return await self._do(calls.act(workflow_id, "close"))

    async def pause(self, workflow_id: str) -> Workflow:
        return await self._do(calls.act(workflow_id, "pause"))

    async def resume(self, workflow_id: str) -> Workflow:
        return await self._do(calls.act(workflow_id, "resume"))

    async def cancel(self, workflow_id: str) -> Workflow:
        return await self._do(calls.act(workflow_id, "cancel"))

    async def complete(self, workflow_id: str) -> Workflow:
        return await self._do(calls.act(workflow_id, "complete"))

    async def retry(self, workflow_id: str, *, idempotency_key: str | None = None) -> Workflow:
        key = idempotency_key or f"airs-{uuid.uuid4().hex}"
        return await self._do(calls.retry(workflow_id, idempotency_key=key))

    async def change(
        self,
        workflow_id: str,
        *,
        name: str | None = None,
        priority: int | None = None,
        deadline: timedelta | None = None,
    ) -> Workflow:
        call = calls.change(workflow_id, name=name, priority=priority, deadline=deadline)
        return await self._do(call)

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

    async def download(
        self,
        workflow_id: str,
        file: IO[bytes],
        *,
        format: FileFormat = "jsonl",
        state: str | None = None,
    ) -> None:
        """As `Client.workflows.download`; the file is written in a thread."""
        if format == "parquet":
            await self._receive(calls.ratings_file(workflow_id, format=format, state=state), file)
            return
        async for page in self.rating_pages(workflow_id, format=format, state=state):
            await anyio.to_thread.run_sync(file.write, page.content)

    async def distributions(self, workflow_id: str) -> Distributions:
        return await self._do(calls.distributions(workflow_id))


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

    async def register(self, model_id: str, **settings: Any) -> Model:
        """Register a model; `settings` are named as in `POST /models`."""
        return await self._do(calls.register_model({"id": model_id, **settings}))

    async def change(self, model_id: str, **changes: Any) -> Model:
        """Change settings; running replicas take them at their next restart."""
        return await self._do(calls.change_model(model_id, changes))

    async def remove(self, model_id: str) -> None:
        """Remove a model that is not started."""
        await self._do(calls.remove_model(model_id))

    async def start(self, model_id: str) -> Model:
        """Want its replicas; they come within seconds."""
        return await self._do(calls.act_on_model(model_id, "start"))

    async def stop(self, model_id: str) -> Model:
        """Drain and end its replicas."""
        return await self._do(calls.act_on_model(model_id, "stop"))

    async def restart(self, model_id: str) -> Model:
        """Replace its replicas, one at a time while others serve."""
        return await self._do(calls.act_on_model(model_id, "restart"))

    async def resize(self, model_id: str, replicas: int) -> Model:
        """Want another number of replicas."""
        return await self._do(calls.resize_model(model_id, replicas))

    async def versions(self, model_id: str) -> Page[Mapping[str, Any]]:
        """List what was seen of its versions, the newest first."""
        return await self._do(calls.model_versions(model_id))

    async def retire(self, model_id: str, version: str) -> Mapping[str, Any]:
        """End an old version's replicas, whatever work waits for it."""
        return await self._do(calls.retire_model_version(model_id, version))

    async def try_rows(self, model_id: str, rows: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
        """Ask an OIP model once, with queries and texts; nothing is archived."""
        return await self._do(calls.try_model(model_id, rows=rows))

    async def try_message(self, model_id: str, message: str) -> Mapping[str, Any]:
        """Ask a chat model once; nothing is archived."""
        return await self._do(calls.try_model(model_id, message=message))


class _AsyncPools:
    def __init__(self, client: "AsyncClient") -> None:
        self._do = client.do

    async def list(self, *, cursor: str | None = None) -> Page[Pool]:
        return await self._do(calls.pools(cursor=cursor))

    async def get(self, pool_id: str) -> Pool:
        return await self._do(calls.pool(pool_id))

    async def decisions(self, pool_id: str, *, cursor: str | None = None) -> Page[Decision]:
        return await self._do(calls.decisions(pool_id, cursor=cursor))

    async def rebalance(self, pool_id: str, mode: Rebalancing) -> Pool:
        return await self._do(calls.rebalance(pool_id, mode))

    async def register(self, pool_id: str, **settings: Any) -> Pool:
        """Register a pool; `settings` are named as in `POST /pools`."""
        return await self._do(calls.register_pool({"id": pool_id, **settings}))

    async def change(self, pool_id: str, **changes: Any) -> Pool:
        """Change settings of a pool."""
        return await self._do(calls.change_pool(pool_id, changes))

    async def remove(self, pool_id: str) -> None:
        """Remove a pool that no model belongs to."""
        await self._do(calls.remove_pool(pool_id))


class _AsyncArchive:
    def __init__(self, client: "AsyncClient") -> None:
        self._do = client.do

    async def explain(
        self,
        row: Mapping[str, Any],
        *,
        rater: str,
        max_age: timedelta | None = None,
        bypass: bool = False,
    ) -> Mapping[str, Any]:
        return await self._do(calls.explain(row, rater=rater, max_age=max_age, bypass=bypass))

    async def purge(
        self,
        *,
        rater: str | None = None,
        version: int | None = None,
        url: str | None = None,
        before: datetime | None = None,
        dry_run: bool = True,
    ) -> Mapping[str, Any]:
        return await self._do(
            calls.purge(rater=rater, version=version, url=url, before=before, dry_run=dry_run)
        )

    async def purge_state(self, purge_id: str) -> Mapping[str, Any]:
        return await self._do(calls.purge_state(purge_id))


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
        self.pools = _AsyncPools(self)
        self.archive = _AsyncArchive(self)

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

    async def receive(self, call: Call[None], file: IO[bytes]) -> None:
        target = _Target(file)
        attempt = 0
        while True:
            try:
                return await self._stream(call, target)
            except AirsError as failure:
                delay_s = _delay_s(self._retries, failure, call, attempt)
                if delay_s is None or not target.rewind():
                    raise
                if self._on_retry:
                    self._on_retry(failure, delay_s)
            await anyio.sleep(delay_s)
            attempt += 1

    async def _stream(self, call: Call[None], target: "_Target") -> None:
        options = _request_options(call, self._http.timeout)
        try:
            async with self._http.stream(**options) as response:
                if response.status_code != 200:
                    await response.aread()
                    return calls.outcome(call, _reply(response))
                async for piece in response.aiter_bytes():
                    await anyio.to_thread.run_sync(target.write, piece)
        except httpx.HTTPError as error:
            raise _unreachable(self.connection, error) from error

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


class _Target:
    """A file that a stream is written to, again from the start if it breaks off."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._start = file.tell() if file.seekable() else None
        self._written = False

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self._written = True

    def rewind(self) -> bool:
        """Make the file what it was; False if it cannot be."""
        if not self._written:
            return True
        if self._start is None:
            return False
        self._file.seek(self._start)
        self._file.truncate()
        return True


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
        "json": call.document,
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
