"""The admin, Swagger UI and Flower as a platform engineer meets them, in a real Chromium."""

import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.acceptance.stack import Stack, Stub, ndjson, remove, rows, start_stack, start_stub, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCRIPT = "<script>window.__qa = 1</script><img src=x onerror='window.__qa = 1'>"

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(not CHROMIUM, reason="no browser: apt-get install chromium"),
    # Playwright's own transport is closed by the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    server = start_stub(tmp_path_factory.mktemp("stub"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stack(stub: Stub) -> Iterator[Stack]:
    with start_stack(without=()) as running:
        try:
            running.wait_ready()
            running.register(stub, rater="stub")
            yield running
        finally:
            remove(running)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with warnings.catch_warnings(), sync_playwright() as playwright:
        warnings.simplefilter("ignore")
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(stack: Stack, browser: Browser) -> Iterator[Page]:
    """A page that is logged in to the admin, and saw no request to anywhere else."""
    context = browser.new_context(
        base_url=f"http://127.0.0.1:{stack.port}", viewport={"width": 1280, "height": 800}
    )
    opened = context.new_page()
    elsewhere: list[str] = []
    opened.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((f"http://127.0.0.1:{stack.port}/", "data:"))
            else elsewhere.append(request.url)
        ),
    )
    opened.goto("/admin/")
    opened.fill("#id_username", "admin")
    opened.fill("#id_password", stack.credentials["admin_password"])
    opened.click("input[type=submit]")
    expect(opened.locator("h1").first).to_contain_text("AI Rater Service")
    yield opened
    context.close()
    assert not elsewhere


def _finished(stack: Stack, documents: list[dict[str, Any]], name: str) -> str:
    workflow_id: str = stack.submit("stub", ndjson(documents), name=name)["id"]
    stack.wait_finished(workflow_id)
    return workflow_id


def test_the_landing_page_says_what_goes_on(stack: Stack, page: Page) -> None:
    _finished(stack, rows(24, prefix="landing-"), "landing")

    page.reload()

    body = page.locator("body")
    expect(body).to_contain_text("COMPLETED")
    expect(body).to_contain_text("dispatcher")
    expect(body).to_contain_text("executors (1)")


def test_a_finished_workflow_and_its_requests_are_seen(stack: Stack, page: Page) -> None:
    workflow_id = _finished(stack, rows(24, prefix="seen-"), "seen-in-admin")

    page.goto("/admin/fulfillment/workflow/")
    row = page.locator("tr", has_text=workflow_id)
    expect(row).to_contain_text("COMPLETED")
    page.goto("/admin/fulfillment/ratingrequest/")

    expect(page.locator("#result_list")).to_contain_text("seen-0")


def test_a_hosted_model_is_registered_started_and_stopped(stack: Stack, page: Page) -> None:
    page.goto("/admin/models_admin/modelconfig/add/")
    page.fill("#id_id", "tiny-ui")
    page.select_option("#id_kind", "hosted")
    page.fill("#id_checkpoint", "../../etc/passwd")
    page.click("input[name=_save]")
    expect(page.locator(".field-checkpoint .errorlist, .errornote").first).to_be_visible()
    page.fill("#id_checkpoint", "tiny:0")
    page.click("input[name=_save]")
    expect(page.locator(".messagelist")).to_contain_text("tiny-ui")

    _act(page, "tiny-ui", "Start")
    until(
        lambda: stack.client.get("/api/v1/models/tiny-ui").json()["state"] == "READY",
        timeout_s=90,
        what="the model started in the admin is ready",
        every_s=0.3,
    )
    page.reload()
    expect(page.locator("tr", has_text="tiny-ui")).to_contain_text(re.compile("ready", re.I))
    _act(page, "tiny-ui", "Stop")

    until(
        lambda: stack.client.get("/api/v1/models/tiny-ui").json()["state"] == "STOPPED",
        timeout_s=60,
        what="the model stopped in the admin is gone",
        every_s=0.3,
    )


def _act(page: Page, model: str, action: str) -> None:
    page.goto("/admin/models_admin/modelconfig/")
    page.locator("tr", has_text=model).locator("input.action-select").check()
    names = page.locator("select[name=action] option").all_text_contents()
    label = next(name for name in names if name.lower().startswith(action.lower()))
    page.select_option("select[name=action]", label=label)
    page.click("button[name=index]")
    expect(page.locator(".messagelist")).to_be_visible()


def test_texts_of_strangers_are_shown_and_never_run(stack: Stack, page: Page) -> None:
    hostile = {
        "request_id": SCRIPT,
        "query_text": SCRIPT,
        "url": "javascript:window.__qa=1",
        "text": SCRIPT,
    }
    workflow_id = _finished(stack, [hostile], SCRIPT)

    for path in ("workflow", "ratingrequest", "batch"):
        page.goto(f"/admin/fulfillment/{path}/")
        assert page.evaluate("window.__qa") is None
        assert SCRIPT not in page.content()
    page.goto("/admin/fulfillment/workflow/")
    page.locator("tr", has_text=workflow_id).locator("th a, td a").first.click()

    assert page.evaluate("window.__qa") is None
    assert SCRIPT not in page.content()


def test_swagger_shows_the_api_without_anybody_elses_server(page: Page) -> None:
    page.goto("/api/docs")

    expect(page.locator(".swagger-ui .info .title")).to_contain_text("AIRS")
    expect(page.locator("#operations-workflows-workflows_create, .opblock").first).to_be_visible()


def test_flower_asks_for_a_login_and_shows_tasks(stack: Stack, browser: Browser) -> None:
    url = f"http://127.0.0.1:{stack.flower_port}"
    for path in ("/", "/tasks", "/metrics", "/api/tasks"):
        assert httpx.get(f"{url}{path}").status_code == 401, path
    context = browser.new_context(
        http_credentials={
            "username": "admin",
            "password": stack.credentials["admin_password"],
        }
    )
    page = context.new_page()
    _finished(stack, rows(24, prefix="flower-"), "flower")

    page.goto(f"{url}/tasks")

    expect(page.locator("body")).to_contain_text("workers.rate_batches")
    context.close()


def test_screenshots_are_possible(page: Page, tmp_path: Path) -> None:
    """A page that renders nothing would pass many of the above."""
    page.goto("/admin/")
    path = tmp_path / "admin.png"
    page.screenshot(path=path)

    assert path.stat().st_size > 10_000
