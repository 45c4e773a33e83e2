"""Charts of duty cycles in a real Chromium, under the content security policy."""

from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, expect

from tests.acceptance.stack import Stack
from tests.browser.conftest import log_in, watched
from tests.browser.pages import MODELS

pytestmark = [
    pytest.mark.acceptance,
    # Playwright's own transport is closed by the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def register(stack: Stack, pool: str, model: str) -> None:
    """Register a model that nobody starts, and two days of samples with a gap of six hours."""
    assert stack.client.post("/api/v1/pools", json={"id": pool, "devices": 2}).status_code == 201
    hosted = {"id": model, "kind": "hosted", "checkpoint": "tiny:0", "pool": pool}
    assert stack.client.post("/api/v1/models", json=hosted).status_code == 201
    hours = (
        "SELECT now() - n * interval '10 minutes' AS at, random() * 30 AS busy_s "
        "FROM generate_series(0, 287) AS n WHERE n NOT BETWEEN 36 AND 72"
    )
    stack.query(
        f"""
        INSERT INTO models_admin_utilizationsample
            (at, agent, model_id, pool_id, replicas, busy_s, replica_s)
        SELECT at, 'qa', %s, %s, 1, busy_s, 30 FROM ({hours}) AS hours RETURNING id
        """,
        model,
        pool,
    )
    stack.query(
        f"""
        INSERT INTO models_admin_replicasample
            (at, agent, model_id, pool_id, ordinal, host, version, devices, busy_s, lived_s)
        SELECT at, 'qa', %s, %s, 0, 'here', 'v1', 1, busy_s, 30 FROM ({hours}) AS hours
        RETURNING id
        """,
        model,
        pool,
    )


@pytest.mark.parametrize(
    ("scheme", "table"), [("light", "modelconfig"), ("dark", "acceleratorpool")]
)
def test_charts_show_in_the_colours_of_the_theme_and_their_numbers_in_a_table(
    stack: Stack, visitor: Callable[..., BrowserContext], scheme: str, table: str
) -> None:
    pool, model = f"pool-{scheme}", f"duty-{scheme}"
    register(stack, pool, model)
    row, names = {
        "modelconfig": (model, [model, "replica 0"]),
        "acceleratorpool": (pool, [f"pool {pool}", model]),
    }[table]
    with watched(visitor(color_scheme=scheme).new_page(), f"http://127.0.0.1:{stack.port}") as page:
        log_in(page, stack)
        page.goto(f"{MODELS}/{table}/{row}/change/")

        charts = page.locator("#duty .duty-chart")
        expect(charts).to_have_count(2)
        for chart in charts.all():
            expect(chart).to_be_visible()
            assert chart.locator(".name").all_text_contents() == names
            bars = chart.locator(".bars")
            assert all((box := bar.bounding_box()) and box["height"] > 5 for bar in bars.all())
            # Without the style sheet they would be black.
            colour = bars.first.evaluate("e => getComputedStyle(e).fill")
            assert colour == {"light": "rgb(65, 120, 147)", "dark": "rgb(129, 212, 250)"}[scheme]
        numbers = page.locator("#duty details").first
        numbers.locator("summary").click()
        expect(numbers.locator("thead th")).to_have_text(["From", *names])
        expect(numbers.locator("tbody tr").first).to_contain_text("%")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280

        page.goto(f"{MODELS}/acceleratorpool/")
        listed = page.locator("#result_list tr", has_text=pool)
        expect(listed.locator(".field-late")).to_contain_text("% / ")
        list_box = page.locator(".results").bounding_box()
        last_box = listed.locator(".field-notes").bounding_box()
        assert list_box
        assert last_box
        assert last_box["x"] + last_box["width"] <= list_box["x"] + list_box["width"] + 1
