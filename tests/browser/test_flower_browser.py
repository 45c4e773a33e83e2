"""Flower: behind its login, and it shows the tasks."""

from collections.abc import Callable

import httpx
import pytest
from playwright.sync_api import BrowserContext, expect

from tests.acceptance.stack import Stack, ndjson, rows
from tests.browser.conftest import watched

pytestmark = [
    pytest.mark.acceptance,
    # Playwright's own transport is closed by the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

REVOKE = "/api/task/revoke/x"


@pytest.fixture
def flower(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.flower_port}"


@pytest.mark.parametrize("login", [None, ("admin", "admin"), ("admin", "")])
@pytest.mark.parametrize("path", ["/", "/tasks", "/broker", "/metrics", "/api/tasks"])
def test_who_has_no_login_sees_nothing(
    flower: str, path: str, login: tuple[str, str] | None
) -> None:
    answer = httpx.get(f"{flower}{path}", auth=login)

    assert answer.status_code == 401
    assert "workers" not in answer.text


def test_tasks_are_revoked_neither_without_login_nor_by_another_site(
    stack: Stack, flower: str
) -> None:
    login = ("admin", stack.credentials["admin_password"])
    elsewhere = {"Origin": "http://evil.example"}

    assert httpx.post(f"{flower}{REVOKE}").status_code == 401
    assert httpx.post(f"{flower}{REVOKE}", auth=login, headers=elsewhere).status_code == 403


def test_executed_tasks_and_workers_are_shown(
    stack: Stack, flower: str, visitor: Callable[..., BrowserContext]
) -> None:
    finished = stack.submit("stub", ndjson(rows(60, prefix="flower-")), name="for flower")
    stack.wait_finished(finished["id"])
    credentials = {"username": "admin", "password": stack.credentials["admin_password"]}
    window = visitor(base_url=flower, http_credentials=credentials)

    with watched(window.new_page(), flower) as page:
        page.goto("/tasks")
        task = page.locator("#tasks-table tbody tr", has_text="workers.rate_batches").first
        expect(task).to_contain_text("SUCCESS")
        page.goto("/workers")
        table = page.locator("#workers-table")
        for worker in ("executors@", "control@"):
            expect(table.locator("tr", has_text=worker)).to_contain_text("Online")
