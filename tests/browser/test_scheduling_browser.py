"""Pages by which scheduling is looked at and steered, in a real Chromium."""

import subprocess
import sys

import pytest
from playwright.sync_api import Page, expect

from tests.acceptance.stack import REPOSITORY, Stack, ndjson, rows, until
from tests.browser.pages import FULFILLMENT, MODELS, errors, fill, save

pytestmark = [
    pytest.mark.acceptance,
    # Playwright's own transport is closed by the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def run_task(stack: Stack, name: str) -> None:
    """Have a task run that beat would run within the minute."""
    subprocess.run(
        [sys.executable, "-m", "celery", "-A", "airs_site", "call", name],
        cwd=REPOSITORY,
        env=stack.environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def remove(page: Page) -> None:
    """Delete what the page shows, and say yes."""
    page.get_by_role("link", name="Delete", exact=True).click()
    with page.expect_navigation():
        page.locator("#content form input[type=submit]").click()


def test_a_rule_decides_and_the_preview_says_who_would_get_what(stack: Stack, page: Page) -> None:
    page.goto(f"{FULFILLMENT}/priorityrule/add/")
    fill(page, name="bots of qa", owner="qa-bot", default_score="90", ceiling="20")
    save(page)
    assert "ceiling" in str(errors(page)).lower()
    fill(page, default_score="10")
    save(page)
    rule = page.locator("#result_list tr", has_text="bots of qa")
    for text in ("qa-bot", "10", "20"):
        expect(rule).to_contain_text(text)

    # Below the list stands the preview, asked for an owner and a wish.
    fill(page, owner="qa-bot", priority="70")
    with page.expect_navigation():
        page.get_by_role("button", name="Show", exact=True).click()
    preview = page.locator("#content table tbody tr")
    texts = preview.all_inner_texts()
    assert texts
    assert all("70 asked, 20 given: rule 'bots of qa' has a ceiling of 20" in t for t in texts)
    fill(page, owner="somebody")
    with page.expect_navigation():
        page.get_by_role("button", name="Show", exact=True).click()
    assert not any("bots of qa" in text for text in preview.all_inner_texts())

    page.get_by_role("link", name="Priority rules", exact=True).first.click()
    page.locator("#result_list").get_by_role("link", name="bots of qa").click()
    remove(page)
    assert stack.client.get("/api/v1/priority-rules").json()["items"] == []


def weights(stack: Stack) -> dict[str, float]:
    owners = stack.client.get("/api/v1/owners").json()["items"]
    return {owner["owner"]: owner["weight"] for owner in owners}


def test_an_owner_gets_a_weight_and_loses_it_again(stack: Stack, page: Page) -> None:
    page.goto(f"{FULFILLMENT}/ownershare/add/")
    fill(page, owner="qa-team", weight="1000")
    save(page)
    assert "100" in errors(page)["weight"]
    fill(page, weight="2.5", note="launch week")
    save(page)
    row = page.locator("#result_list tr", has_text="qa-team")
    expect(row).to_contain_text("launch week")
    assert weights(stack)["qa-team"] == 2.5

    row.get_by_role("link").first.click()
    remove(page)

    assert "qa-team" not in weights(stack)


def test_a_pool_is_rebalanced_dry_and_then_for_good_and_shows_how_busy_it_was(
    stack: Stack, page: Page
) -> None:
    pool = {"id": "pool-moves", "devices": 2}
    assert stack.client.post("/api/v1/pools", json=pool).status_code == 201
    model = {"id": "moved", "kind": "hosted", "checkpoint": "tiny:0", "pool": "pool-moves"}
    assert stack.client.post("/api/v1/models", json=model).status_code == 201
    assert stack.client.post("/api/v1/models/moved/start").status_code == 202
    for mode, said in (("dry_run", "dry run: it says what it would move"), ("on", "On")):
        page.goto(f"{MODELS}/acceleratorpool/pool-moves/change/")
        fill(page, rebalancing=mode)
        save(page)
        listed = page.locator("#result_list tr", has_text="pool-moves")
        expect(listed.locator(".field-rebalancing")).to_have_text(said)
        # Two rounds within half a minute are one.
        stack.query(
            "UPDATE models_admin_pooloutlook SET at = at - interval '1 minute' RETURNING pool_id"
        )
        run_task(stack, "models_admin.rebalance")
        until(
            lambda mode=mode: stack.query(  # type: ignore[misc]
                "SELECT 1 FROM models_admin_rebalancedecision WHERE pool_id = %s AND mode = %s",
                "pool-moves",
                mode,
            ),
            timeout_s=20,
            what=f"a decision, {mode}",
        )

    page.goto(f"{MODELS}/rebalancedecision/?pool_id=pool-moves")
    decided = page.locator("#result_list tbody tr")
    assert {"on", "dry run: it says what it would move"} <= {
        cell.lower() for cell in decided.locator(".field-mode").all_inner_texts()
    }
    page.get_by_role("link", name="On", exact=True).click()
    expect(decided.first.locator(".field-reason")).not_to_be_empty()
    assert {c.lower() for c in decided.locator(".field-mode").all_inner_texts()} == {"on"}
    page.goto(f"{MODELS}/acceleratorpool/pool-moves/change/")
    expect(page.locator(".field-found")).to_contain_text("UTC: ")
    fill(page, rebalancing="off")
    save(page)
    assert stack.client.get("/api/v1/pools/pool-moves").json()["rebalancing"] == "off"

    _is_busy_for_three_quarters(stack, page)
    stack.client.post("/api/v1/models/moved/stop")


def _is_busy_for_three_quarters(stack: Stack, page: Page) -> None:
    stack.query(
        """
        INSERT INTO models_admin_utilizationsample
            (at, agent, model_id, pool_id, replicas, busy_s, replica_s)
        VALUES (now(), 'qa', 'moved', 'pool-moves', 1, 3e6, 4e6) RETURNING id
        """
    )
    for address, place in (
        ("acceleratorpool/pool-moves", ".field-duty"),
        ("modelconfig/moved", "#replicas"),
    ):
        page.goto(f"{MODELS}/{address}/change/")
        expect(page.locator(place)).to_contain_text("75.0% in the last hour")
    page.goto(f"{MODELS}/utilizationsample/")
    page.get_by_role("link", name="moved", exact=True).click()
    page.get_by_role("link", name="pool-moves", exact=True).click()
    sample = page.locator("#result_list tr", has_text="qa")
    for text in ("moved", "75.0%"):
        expect(sample).to_contain_text(text)
    expect(page.locator(".object-tools .addlink")).to_have_count(0)
    sample.get_by_role("link").first.click()
    expect(page.locator("input[name=_save]")).to_have_count(0)


def test_the_page_of_a_workflow_says_what_is_expected_of_it(stack: Stack, page: Page) -> None:
    first = stack.submit("stub", ndjson(rows(24, prefix="cost-")))
    stack.wait_finished(first["id"])

    def measured() -> object:
        run_task(stack, "fulfillment.sample_queue")
        run_task(stack, "fulfillment.renew_forecasts")
        return stack.query("SELECT 1 FROM fulfillment_ratercost WHERE rater_id = 'stub'")

    until(measured, timeout_s=60, what="what the rater's work takes is known", every_s=1)

    documents = rows(12_000, prefix="late-", words=3)
    workflow_id = stack.submit("stub", ndjson(documents), deadline_s=10)["id"]

    page.goto(f"{FULFILLMENT}/workflow/?q={workflow_id}")
    page.locator("#result_list tr", has_text=workflow_id).get_by_role("link").first.click()
    forecast = page.locator(".field-forecast")
    for text in ("% in time: ", "do not fit before the deadline", "Said at ", "At first "):
        expect(forecast).to_contain_text(text)
    expect(page.locator(".field-standing")).to_contain_text("share")
    stack.client.post(f"/api/v1/workflows/{workflow_id}/cancel")
    stack.wait_finished(workflow_id)
