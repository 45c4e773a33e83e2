"""The admin and Swagger UI as a platform engineer meets them, in a real Chromium.

Each page of these tests fails its test if it asks another server for anything, if a script of it
fails, or if the content security policy had to refuse something (conftest.watched).
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.acceptance.stack import Stack, Stub, ndjson, rows, until
from tests.browser.conftest import log_in
from tests.browser.pages import FULFILLMENT, MODELS, act, confirm, errors, fill, save
from tests.fakes import Step, scripted

pytestmark = [
    pytest.mark.acceptance,
    # Playwright's own transport is closed by the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HOSTILE = (
    "<script>window.__qa=1</script>",
    '"><img src=x onerror=window.__qa=1>',
    "</textarea><svg onload=window.__qa=1>",
    "{{constructor.constructor('window.__qa=1')()}}",
    "<a href=javascript:window.__qa=1>x</a>",
    "'-window.__qa-'",
    "javascript:window.__qa=1",
    "<b>bold?</b> & <3",
)
"""Texts of strangers that run, or change the page, where they are not escaped."""
TAGS = ("<script>window", "<img src=x", "<svg onload", "<a href=javascript", "<b>bold")


def rated(stack: Stack, documents: list[dict[str, Any]], name: str, rater: str = "stub") -> str:
    workflow_id: str = stack.submit(rater, ndjson(documents), name=name)["id"]
    stack.wait_finished(workflow_id)
    return workflow_id


def test_the_landing_page_says_what_goes_on(stack: Stack, page: Page) -> None:
    rated(stack, rows(24, prefix="landing-"), "landing")

    page.reload()

    overview = page.locator("#overview")
    for text in ("COMPLETED", "stub", "model-stub", "dispatcher", "beat", "executors (1)"):
        expect(overview).to_contain_text(text)
    expect(overview).not_to_contain_text("does not run")
    address = overview.get_by_role("link", name="Flower").get_attribute("href")
    assert address == f"http://127.0.0.1:{stack.flower_port}/"


def test_an_external_model_and_its_rater_are_registered_and_rate(
    stack: Stack, stub: Stub, page: Page
) -> None:
    page.goto(f"{MODELS}/modelconfig/add/")
    fill(page, id="ext-ui", kind="external", model_name="stub", url=stub.url)
    fill(page, new_api_key="sk-qa-0123456789abcdef")
    save(page)
    page.goto(f"{FULFILLMENT}/rater/add/")
    fill(page, id="ext-rater", autorater="oip_score", model_id="ext-ui")
    save(page)
    expect(page.locator("#result_list tr", has_text="ext-rater")).to_contain_text("ext-rater@1")

    workflow_id = rated(stack, rows(24, prefix="ext-"), "through the admin", "ext-rater")

    page.goto(f"{FULFILLMENT}/workflow/?q={workflow_id}")
    row = page.locator("#result_list tr", has_text=workflow_id)
    for text in ("through the admin", "COMPLETED", "24 / 24", "0 (0%)"):
        expect(row).to_contain_text(text)
    row.get_by_role("link").first.click()
    expect(page.locator(".field-progress")).to_contain_text("24 completed, 0 failed")
    page.get_by_role("link", name="requests", exact=True).click()
    expect(page.locator("#result_list tbody tr")).to_have_count(24)
    page.locator("#result_list th a").first.click()
    page.locator(".field-rating a").click()
    expect(page.locator(".field-next_use")).to_contain_text("Taken until")
    page.goto(f"{MODELS}/modelconfig/ext-ui/change/")
    expect(page.locator(".field-api_key_hint")).to_contain_text("…cdef")
    assert "sk-qa-0123" not in page.content()


def test_a_hosted_model_is_started_restarted_and_stopped(stack: Stack, page: Page) -> None:
    page.goto(f"{MODELS}/acceleratorpool/add/")
    fill(page, id="pool-ui", devices="2")
    save(page)
    page.goto(f"{MODELS}/modelconfig/add/")
    fill(page, id="tiny-ui", kind="hosted", checkpoint="tiny:0", pool="pool-ui")
    save(page)
    expect(page.locator(".messagelist")).to_contain_text("tiny-ui")

    assert "Started tiny-ui." in act(page, "tiny-ui", "start")
    _shows(page, "1 of 1 ready: 1 READY")
    # Its share of time is known from the second look of the host agent on.
    until(
        lambda: [row["busy"][-1:] for row in _serving(page)] == ["%"],
        timeout_s=20,
        what="it says how busy it is",
    )
    (before,) = _serving(page)
    assert "Restarted tiny-ui." in act(page, "tiny-ui", "restart")

    def is_another() -> bool:
        return [row["pid"] != before["pid"] for row in _serving(page)] == [True]

    until(is_another, timeout_s=90, what="another replica serves", every_s=0.3)
    assert "Stopped tiny-ui." in act(page, "tiny-ui", "stop")
    _shows(page, "0 of 0 ready")

    assert before["seen"].endswith("s ago")


def test_the_page_of_a_model_is_acted_on_watched_and_tried(stack: Stack, page: Page) -> None:
    model = {"id": "tiny-page", "kind": "hosted", "checkpoint": "tiny:0", "replicas": {"max": 2}}
    assert stack.client.post("/api/v1/models", json=model).status_code == 201
    page.goto(f"{MODELS}/modelconfig/tiny-page/change/")
    replicas = page.locator("#replicas")
    expect(replicas).to_contain_text("start the model")

    _do(page, "Start")
    expect(page.locator(".messagelist")).to_contain_text("Started tiny-page.")
    # The table follows by itself: nobody loads the page again.
    expect(replicas).to_contain_text("1 of 1 ready: 1 READY", timeout=90_000)
    first = replicas.locator("tr.replica").first
    expect(first.locator(".field-address")).to_contain_text("http://")
    expect(first.locator(".field-busy")).to_contain_text("%", timeout=20_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280

    page.fill("#id_try-query", "tea")
    page.fill("#id_try-texts", "green tea\n<b>rocks</b>")
    with page.expect_navigation():
        page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#tried .field-output")).to_have_count(2)
    expect(page.locator("#tried .field-output").first).to_contain_text("score")
    expect(page.locator("#tried .field-facts")).to_contain_text("version tiny-0")
    page.get_by_role("link", name="Back to the model").click()

    # By the keyboard alone: the link, the number, the button.
    page.get_by_role("link", name="Resize", exact=True).focus()
    page.keyboard.press("Enter")
    number = page.locator("#id_replicas")
    expect(number).to_have_value("1")
    number.fill("3")
    with page.expect_navigation():
        number.press("Enter")
    expect(page.locator(".messagelist")).to_contain_text("replicas: from 0 to 2")
    page.get_by_role("link", name="Resize", exact=True).click()
    page.locator("#id_replicas").fill("2")
    with page.expect_navigation():
        page.locator("#id_replicas").press("Enter")
    expect(page.locator(".messagelist")).to_contain_text("Resized tiny-page.")
    expect(replicas).to_contain_text("2 of 2 ready: 2 READY", timeout=90_000)

    page.get_by_role("link", name="Stop", exact=True).click()
    expect(page.locator("#content")).to_contain_text("2 of 2 ready")
    page.get_by_role("link", name="Back", exact=True).click()
    _do(page, "Stop")
    expect(replicas).to_contain_text("0 of 0 ready: 2 STOPPED", timeout=60_000)
    page.goto(f"{MODELS}/auditentry/?kind=model&q=tiny-page")
    acts = page.locator("#result_list .field-action").all_inner_texts()
    assert acts == [
        *("model_stopped", "model_resized", "model_tried", "model_started", "model_registered")
    ]


def _do(page: Page, act: str) -> None:
    """Follow a link of the model's page, and say yes."""
    page.get_by_role("link", name=act, exact=True).click()
    confirm(page)


def _shows(page: Page, replicas: str) -> None:
    """Look at the list of models until it says so."""

    def shown() -> bool:
        page.goto(f"{MODELS}/modelconfig/?q=tiny-ui")
        return replicas in page.locator("#result_list").inner_text()

    until(shown, timeout_s=90, what=f"tiny-ui shows {replicas!r}", every_s=0.3)


def _serving(page: Page) -> list[dict[str, str]]:
    """Return the rows of the replica table that serve; go back to the list."""
    page.goto(f"{MODELS}/modelconfig/tiny-ui/change/")
    rows = [
        {
            str(cell.get_attribute("class")).removeprefix("field-"): cell.inner_text()
            for cell in row.locator("td[class^=field-]").all()
        }
        for row in page.locator("#replicas tr.replica").all()
    ]
    page.go_back()
    return [row for row in rows if row["state"].startswith("READY")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"id": "a b", "kind": "external", "model_name": "m", "url": "ftp://x"},
            {"id": "slug", "url": "only http and https"},
        ),
        (
            {"id": "x", "kind": "external", "model_name": "m", "url": "http://x/?key=a"},
            {"url": "no user, query or fragment"},
        ),
        (
            {"id": "x", "kind": "hosted", "checkpoint": "../../etc/passwd", "serving": '{"a": 1}'},
            {"checkpoint": "under the checkpoint root", "serving": "the options are"},
        ),
        (
            {"id": "x", "kind": "hosted", "checkpoint": "tiny:0", "devices_per_replica": "9"},
            {"pool": "the pool has 1 devices"},
        ),
    ],
)
def test_what_is_wrong_with_a_model_is_said_at_its_field(
    page: Page, fields: dict[str, str], expected: dict[str, str]
) -> None:
    if "pool" in expected:
        page.goto(f"{MODELS}/acceleratorpool/add/")
        fill(page, id="small", devices="1")
        save(page)
        fields = fields | {"pool": "small"}
    page.goto(f"{MODELS}/modelconfig/add/")
    fill(page, **fields)
    fill(page, new_headers='{"X-Key": "sk-qa-headers"}')

    save(page)

    found = errors(page)
    for field, text in expected.items():
        assert text in found[field]
    assert "" not in found
    assert "sk-qa-headers" not in page.content()


def test_what_is_wrong_with_a_rater_is_said_at_its_field(page: Page) -> None:
    page.goto(f"{FULFILLMENT}/rater/add/")
    assert page.locator("#id_freshness_s").evaluate("e => e.scrollWidth <= e.clientWidth"), (
        "the default does not fit"
    )
    fill(page, id="bad", autorater="oip_score", model_id="nowhere", config='{"zzz": 1}')

    save(page)

    found = errors(page)
    assert "There is no model 'nowhere'" in found["model_id"]
    assert "max_text_chars" in found["config"]
    assert "" not in found
    fill(page, autorater="nope")
    save(page)
    assert "known are llm_judge, needs_met, oip_score" in errors(page)["autorater"]


def test_a_workflow_is_cancelled_with_the_keyboard_alone(stack: Stack, page: Page) -> None:
    documents = rows(12_000, prefix="cancel-", words=3)
    workflow_id = stack.submit("stub", ndjson(documents), name="cancel me")["id"]
    page.goto(f"{FULFILLMENT}/workflow/?q={workflow_id}")

    # A select turns to the option that one types.
    _tab_to(page, "select[name=action]")
    page.keyboard.type("Cancel")
    _tab_to(page, "input.action-select")
    page.keyboard.press("Space")
    _tab_to(page, "button[name=index]", backwards=True)
    with page.expect_navigation():
        page.keyboard.press("Enter")
    _tab_to(page, "button[name=confirmed]")
    with page.expect_navigation():
        page.keyboard.press("Enter")

    expect(page.locator(".messagelist")).to_contain_text(f"Workflow {workflow_id} is ")
    assert stack.wait_finished(workflow_id)["state"] == "CANCELLED"
    page.reload()
    expect(page.locator("#result_list tr", has_text=workflow_id)).to_contain_text("CANCELLED")


def _tab_to(page: Page, selector: str, *, backwards: bool = False) -> None:
    for _ in range(120):
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return
    raise AssertionError(f"the keyboard does not reach {selector}")


def test_texts_of_strangers_are_shown_and_never_run(stack: Stack, page: Page) -> None:
    documents = [
        {
            "request_id": f"{text} {number}", "query_id": text, "result_id": text,
            "query_text": text, "url": text, "html": text, "title": text, "more": text,
        }
        for number, text in enumerate(HOSTILE)
    ]  # fmt: skip
    workflows = [rated(stack, documents, text) for text in HOSTILE[:2]]
    paused = _paused_by(stack, documents)
    answer = stack.client.post("/api/v1/tokens", json={"user": HOSTILE[0], "role": "viewer"})
    assert answer.status_code == 201, answer.text

    addresses = [
        *(f"{FULFILLMENT}/{name}/" for name in ("workflow", "ratingrequest", "batch", "apitoken")),
        *(f"{FULFILLMENT}/{name}/" for name in ("rater", "event", "rating")),
        *(f"{FULFILLMENT}/ratingrequest/?q={workflow}" for workflow in workflows),
        f"{FULFILLMENT}/rater/{paused}/change/",
        f"{FULFILLMENT}/rater/{paused}/history/",
        f"{FULFILLMENT}/workflow/?q=%3Cscript%3Ewindow.__qa=1%3C/script%3E",
        f"{FULFILLMENT}/apitoken/{_token_of(stack, HOSTILE[0])}/delete/",
        *_pages_of(page, f"{FULFILLMENT}/workflow/?q={workflows[0]}"),
        *_pages_of(page, f"{FULFILLMENT}/ratingrequest/?q={workflows[0]}"),
    ]
    for address in addresses:
        response = page.goto(address)
        assert response is not None
        assert response.status == 200, address
        _is_harmless(page, response.text(), response.headers)

    page.goto(f"{FULFILLMENT}/ratingrequest/?q={workflows[0]}")
    for text in HOSTILE:
        expect(page.locator("#result_list")).to_contain_text(text)
    page.goto(f"{FULFILLMENT}/rater/")
    expect(page.locator("#result_list")).to_contain_text("paused: ")


def _paused_by(stack: Stack, documents: list[dict[str, Any]]) -> str:
    """Let a model refuse its key with a hostile text; return the rater that this pauses."""
    body = json.dumps({"error": "".join(HOSTILE)}).encode()
    with scripted(Step(status=401, body=body, close=True)) as server:
        model = {"id": "rude", "kind": "external", "url": server.url, "model_name": "m"}
        assert stack.client.post("/api/v1/models", json=model).status_code == 201
        rater = {"id": "rude", "autorater": "oip_score", "model": "rude", "score_max": 4}
        answer = stack.client.post("/api/v1/raters", json={"score_min": 0, **rater})
        assert answer.status_code == 201, answer.text
        workflow_id = stack.submit("rude", ndjson(documents))["id"]
        until(
            lambda: stack.query("SELECT 1 FROM fulfillment_rater WHERE paused_detail <> ''"),
            timeout_s=30,
            what="the rater is paused",
        )
        stack.client.post(f"/api/v1/workflows/{workflow_id}/cancel")
    return "rude"


def _token_of(stack: Stack, user: str) -> int:
    found: int = stack.query('SELECT id FROM fulfillment_apitoken WHERE "user" = %s', user)[0][0]
    return found


def _pages_of(page: Page, address: str) -> list[str]:
    page.goto(address)
    links = page.locator("#result_list th a, #result_list td.field-public_id a").all()
    return [str(link.get_attribute("href")).split("?")[0] for link in links]


def _is_harmless(page: Page, source: str, headers: dict[str, str]) -> None:
    assert page.evaluate("window.__qa") is None, page.url
    assert not [tag for tag in TAGS if tag in source], page.url
    assert page.locator("a[href^='javascript:']").count() == 0
    policy = dict(part.strip().split(" ", 1) for part in _policy(headers).split(";"))
    assert policy["script-src"] == "'self'"


def _policy(headers: dict[str, str]) -> str:
    return headers["content-security-policy"]


def test_an_injected_script_would_be_refused(
    stack: Stack, visitor: Callable[..., BrowserContext]
) -> None:
    """The policy holds where an escape would be forgotten."""
    page = visitor().new_page()  # not watched: it is to complain
    log_in(page, stack)
    refused: list[str] = []
    page.on("console", lambda line: refused.append(line.text))

    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.__qa=1>');"
        "const script = document.createElement('script');"
        "script.textContent = 'window.__qa=1'; document.body.append(script);"
    )

    until(lambda: "script-src" in " ".join(refused), timeout_s=10, what="the script is refused")
    assert page.evaluate("window.__qa") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lists_are_readable_at_1280_pixels(
    stack: Stack, visitor: Callable[..., BrowserContext], scheme: str
) -> None:
    rated(stack, rows(24, prefix=f"{scheme}-"), "a name of some length")
    page = visitor(color_scheme=scheme).new_page()
    log_in(page, stack)

    for address, column in {
        f"{FULFILLMENT}/workflow/": "deadline_at",
        f"{FULFILLMENT}/ratingrequest/": "rated_at",
        f"{FULFILLMENT}/batch/": "attempts",
        f"{FULFILLMENT}/rater/": "sending",
        f"{FULFILLMENT}/executorboot/": "seen",
        f"{MODELS}/modelserver/": "seen",
        f"{MODELS}/modelconfig/": "replicas",
    }.items():
        page.goto(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        table = page.locator(".results").bounding_box()
        cell = page.locator(f"#result_list .field-{column}").first.bounding_box()
        assert table is not None
        assert cell is not None
        assert cell["x"] + cell["width"] <= table["x"] + table["width"] + 1, address
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 18, 18)"}[scheme]


def test_swagger_shows_the_api_without_anybody_elses_server(page: Page) -> None:
    page.goto("/api/docs")

    expect(page.locator(".swagger-ui .info .title")).to_contain_text("AIRS")
    page.locator(".opblock-summary", has_text="/api/v1/workflows").first.click()
    expect(page.locator(".opblock-body").first).to_be_visible()


def test_health_is_for_everybody(visitor: Callable[..., BrowserContext]) -> None:
    page = visitor().new_page()

    for address in ("/healthz", "/readyz"):
        response = page.goto(address)
        assert response is not None
        assert response.json()["status"] == "ok"
