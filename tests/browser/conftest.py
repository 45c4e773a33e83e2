"""A stack, a Chromium and a page that is logged in, for tests of what people see."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, sync_playwright

from tests.acceptance.stack import Stack, Stub, remove, start_stack, start_stub

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = [
    *(["--no-sandbox"] if os.geteuid() == 0 else []),
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
SIZE = {"width": 1280, "height": 800}


@dataclass(kw_only=True)
class Seen:
    """What a page did beside what it shows."""

    origin: str
    elsewhere: list[str] = field(default_factory=list)
    """Requests to other servers."""
    complaints: list[str] = field(default_factory=list)
    """Script errors and what the content security policy refused."""

    def watch(self, page: Page) -> None:
        page.on("request", self._request)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "console",
            lambda line: self.complaints.append(line.text) if line.type == "error" else None,
        )

    def _request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.origin}/", "data:")):
            self.elsewhere.append(request.url)


@pytest.fixture(scope="package")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    """An external model that takes a moment."""
    server = start_stub(tmp_path_factory.mktemp("stub"), delay_s=0.1)
    yield server
    server.stop()


@pytest.fixture(scope="package")
def stack(stub: Stub) -> Iterator[Stack]:
    """The whole stack, with a rater `stub`."""
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium")
    with start_stack(without=()) as running:
        try:
            running.wait_ready()
            # What `bootstrap` starts where the weights are installed: nobody asks it anything here.
            running.client.post("/api/v1/models/minilm/stop")
            running.register(stub, rater="stub", max_concurrency=4)
            yield running
        finally:
            remove(running)


# Not for the package: while it runs, this thread has an event loop, which tests that pytest puts
# between these may not expect.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with warnings.catch_warnings(), sync_playwright() as playwright:
        warnings.simplefilter("ignore")
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def visitor(stack: Stack, chromium: Browser) -> Iterator[Callable[..., BrowserContext]]:
    """Makes browser windows, for the web server unless told otherwise, that are closed again."""
    opened: list[BrowserContext] = []

    def visit(**options: object) -> BrowserContext:
        base = {"base_url": f"http://127.0.0.1:{stack.port}", "viewport": SIZE}
        opened.append(chromium.new_context(**(base | options)))  # type: ignore[arg-type]
        return opened[-1]

    yield visit
    for context in opened:
        context.close()


@pytest.fixture
def page(stack: Stack, visitor: Callable[..., BrowserContext]) -> Iterator[Page]:
    """A page logged in to the admin; asks nobody else for anything, and has no script error."""
    with watched(visitor().new_page(), f"http://127.0.0.1:{stack.port}") as shown:
        log_in(shown, stack)
        yield shown


@contextmanager
def watched(page: Page, origin: str) -> Iterator[Page]:
    """Fail after the test if the page asked another server or had something to complain of."""
    seen = Seen(origin=origin)
    seen.watch(page)
    yield page
    assert seen.elsewhere == []
    assert seen.complaints == []


def log_in(page: Page, stack: Stack) -> None:
    page.goto("/admin/")
    page.fill("#id_username", "admin")
    page.fill("#id_password", stack.credentials["admin_password"])
    page.keyboard.press("Enter")
    page.wait_for_selector("#user-tools")
