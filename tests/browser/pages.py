"""What people do on pages of the admin."""

from playwright.sync_api import Page

FULFILLMENT = "/admin/fulfillment"
MODELS = "/admin/models_admin"


def fill(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        control = page.locator(f"#id_{name}")
        if control.evaluate("e => e.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)


def save(page: Page) -> None:
    with page.expect_navigation():
        page.click("input[name=_save]")


def errors(page: Page) -> dict[str, str]:
    """Return the texts beside the fields of a form, by field; '' is the top."""
    found: dict[str, str] = {}
    for problem in page.locator("ul.errorlist").all():
        row = problem.locator("xpath=ancestor::div[contains(@class, 'field-')][1]")
        classes = row.get_attribute("class").split() if row.count() else [""]  # type: ignore[union-attr]
        field = next((c.removeprefix("field-") for c in classes if c.startswith("field-")), "")
        found[field] = problem.inner_text()
    return found


def act(page: Page, row: str, action: str) -> str:
    """Choose a row of the list that is shown and do something to it; return what is said."""
    page.locator("#result_list tr", has_text=row).locator("input.action-select").check()
    page.select_option("select[name=action]", action)
    with page.expect_navigation():
        page.click("button[name=index]")
    confirm(page)
    return page.locator(".messagelist").inner_text()


def confirm(page: Page) -> None:
    """Say yes where the page asks."""
    if (button := page.locator("button[name=confirmed]")).count():
        with page.expect_navigation():
            button.click()
