"""The pure parts of the client: retries, addresses and tokens, durations, what people read."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from airs_client import (
    ApiError,
    AuthError,
    Conflict,
    Connection,
    Eta,
    InvalidInput,
    InvalidSettings,
    NotFound,
    RateLimited,
    Retries,
    ServerError,
    UnexpectedAnswer,
    Unreachable,
    resolve,
)
from airs_client.durations import duration_from
from airs_client.errors import AirsError, from_answer
from airs_client.rendering import duration, eta, fields, printable, problem, table
from airs_client.results import workflow_from
from airs_client.retries import retry_after_s
from hypothesis import given
from hypothesis import strategies as st

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def refusal(status: int, *, code: str = "x", retry_after_s: float | None = None) -> ApiError:
    body = json.dumps({"code": code, "detail": "no"}).encode()
    return from_answer(
        status=status,
        content_type="application/problem+json",
        body=body,
        retry_after_s=retry_after_s,
    )


@pytest.mark.parametrize(
    ("failure", "again"),
    [
        (Unreachable("http://x", "refused"), True),
        (refusal(429), True),
        (refusal(502), True),
        (refusal(503), True),
        (refusal(504), True),
        (refusal(409, code="upload_in_progress"), True),
        (refusal(409, code="idempotency_conflict"), False),
        (refusal(400), False),
        (refusal(401), False),
        (refusal(404), False),
        (refusal(422), False),
        (refusal(500), False),
        (refusal(507), False),
        (UnexpectedAnswer("html"), False),
    ],
)
def test_only_failures_that_pass_by_themselves_are_tried_again(
    failure: AirsError, again: bool
) -> None:
    delay_s = Retries().delay_s(failure, repeatable=True, attempt=0, chance=0.5)

    assert (delay_s is not None) == again


def test_a_call_that_may_do_harm_twice_is_never_repeated() -> None:
    assert Retries().delay_s(refusal(503), repeatable=False, attempt=0, chance=0.5) is None


def test_retries_end() -> None:
    retries = Retries(max_retries=2)

    assert retries.delay_s(refusal(503), repeatable=True, attempt=1, chance=0) is not None
    assert retries.delay_s(refusal(503), repeatable=True, attempt=2, chance=0) is None


@given(attempt=st.integers(0, 10_000), chance=st.floats(0, 1))
def test_a_pause_lies_between_half_and_all_of_the_doubled_and_capped_base(
    attempt: int, chance: float
) -> None:
    retries = Retries(max_retries=100_000, base_s=0.5, cap_s=10)

    delay_s = retries.delay_s(refusal(503), repeatable=True, attempt=attempt, chance=chance)

    backoff_s = min(10.0, 0.5 * 2 ** min(attempt, 10))
    assert delay_s is not None
    assert backoff_s / 2 <= delay_s <= backoff_s


def test_retry_after_is_a_floor_and_too_long_a_one_ends_the_tries() -> None:
    retries = Retries(longest_wait_s=120)

    def delay_s(asked_s: float) -> float | None:
        failure = refusal(429, retry_after_s=asked_s)
        return retries.delay_s(failure, repeatable=True, attempt=0, chance=0)

    assert delay_s(7) == 7
    assert delay_s(0) == 0.25
    assert delay_s(121) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("Fri, 02 Jan 2026 03:04:35 GMT", 30.0),
        ("Fri, 02 Jan 2026 03:00:00 GMT", 0.0),
        ("soon", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("9" * 400, None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date_and_rubbish_is_ignored(
    value: str | None, seconds: float | None
) -> None:
    assert retry_after_s(value, now=NOW) == seconds


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidInput),
        (401, AuthError),
        (403, AuthError),
        (404, NotFound),
        (409, Conflict),
        (413, InvalidInput),
        (422, InvalidInput),
        (429, RateLimited),
        (500, ServerError),
        (507, ServerError),
    ],
)
def test_each_cause_has_its_error(status: int, kind: type[ApiError]) -> None:
    assert type(refusal(status)) is kind


@pytest.mark.parametrize("body", [b"", b"<html>Bad gateway</html>", b"[1]", b"{", b"[" * 100_000])
def test_an_answer_that_is_no_problem_document_is_still_an_error_with_its_status(
    body: bytes,
) -> None:
    error = from_answer(status=502, content_type="application/json", body=body)

    assert error.code == "http_502"
    assert error.items == ()


class TestConnection:
    @pytest.fixture
    def home(self, tmp_path: Path) -> Path:
        home = tmp_path / "home"
        (home / ".config" / "airs").mkdir(parents=True)
        return home

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        directory = tmp_path / "project"
        (directory / ".airs").mkdir(parents=True)
        return directory

    def write_profiles(self, home: Path) -> None:
        (home / ".config" / "airs" / "config.toml").write_text(
            'default_profile = "lab"\n'
            '[profiles.lab]\nurl = "https://lab.example.org/"\ntoken = "of-lab"\n'
            '[profiles.far]\nurl = "https://far.example.org"\ntoken = "of-far"\n'
        )

    def write_credentials(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "credentials.json").write_text(
            json.dumps({"url": "http://127.0.0.1:8001", "api_token": "of-up"})
        )

    def test_without_any_settings_the_default_address_and_no_token(
        self, home: Path, directory: Path
    ) -> None:
        found = resolve(environ={}, home=home, directory=directory)

        assert found == Connection(url="http://127.0.0.1:8000", token=None)

    def test_what_make_up_left_serves_as_a_last_resort(self, home: Path, directory: Path) -> None:
        self.write_credentials(directory / ".airs")

        found = resolve(environ={}, home=home, directory=directory)

        assert found == Connection(url="http://127.0.0.1:8001", token="of-up")

    def test_airs_home_says_where_make_up_left_it(
        self, home: Path, directory: Path, tmp_path: Path
    ) -> None:
        self.write_credentials(tmp_path / "elsewhere")

        found = resolve(
            environ={"AIRS_HOME": str(tmp_path / "elsewhere")}, home=home, directory=directory
        )

        assert found.token == "of-up"

    def test_the_environment_goes_before_the_profile_and_arguments_before_all(
        self, home: Path, directory: Path
    ) -> None:
        self.write_profiles(home)
        environ = {"AIRS_URL": "https://env.example.org", "AIRS_API_TOKEN": "of-env"}

        by_profile = resolve(environ={}, home=home, directory=directory)
        by_environ = resolve(environ=environ, home=home, directory=directory)
        by_name = resolve(profile="far", environ=environ, home=home, directory=directory)
        by_argument = resolve(
            url="https://arg.example.org",
            token="of-arg",
            environ=environ,
            home=home,
            directory=directory,
        )

        assert by_profile == Connection(url="https://lab.example.org", token="of-lab")
        assert by_environ == Connection(url="https://env.example.org", token="of-env")
        assert by_name == Connection(url="https://far.example.org", token="of-far")
        assert by_argument == Connection(url="https://arg.example.org", token="of-arg")

    def test_a_stored_token_goes_only_to_the_address_that_it_is_stored_with(
        self, home: Path, directory: Path
    ) -> None:
        self.write_profiles(home)
        self.write_credentials(directory / ".airs")

        other = resolve(
            environ={"AIRS_URL": "https://other.example.org"}, home=home, directory=directory
        )
        same = resolve(
            environ={"AIRS_URL": "http://localhost:8001"}, home=home, directory=directory
        )

        assert other.token is None
        assert same.token == "of-up"

    def test_a_token_from_the_environment_never_goes_to_an_address_found_in_a_directory(
        self, home: Path, directory: Path
    ) -> None:
        self.write_credentials(directory / ".airs")

        foreign = resolve(environ={"AIRS_API_TOKEN": "mine"}, home=home, directory=directory)
        same = resolve(environ={"AIRS_API_TOKEN": "of-up"}, home=home, directory=directory)

        assert foreign == Connection(url="http://127.0.0.1:8000", token="mine")
        assert same.url == "http://127.0.0.1:8001"

    @pytest.mark.parametrize(
        "settings",
        [
            {"AIRS_URL": "127.0.0.1:8000"},
            {"AIRS_URL": "ftp://x"},
            {"AIRS_URL": "http://x:port"},
            {"AIRS_API_TOKEN": "tök en"},
            {"AIRS_PROFILE": "missing"},
        ],
    )
    def test_settings_that_cannot_work_are_named(
        self, settings: dict[str, str], home: Path, directory: Path
    ) -> None:
        with pytest.raises(InvalidSettings):
            resolve(environ=settings, home=home, directory=directory)

    def test_a_broken_profile_file_is_named(self, home: Path, directory: Path) -> None:
        (home / ".config" / "airs" / "config.toml").write_text("[profiles")

        with pytest.raises(InvalidSettings, match=r"config\.toml"):
            resolve(environ={}, home=home, directory=directory)

    def test_a_token_is_not_shown(self) -> None:
        assert "secret" not in repr(Connection(url="http://x", token="secret"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("1h30m", 5400),
        ("90min", 5400),
        ("1d 2h", 93600),
        ("45s", 45),
        ("7200", 7200),
        ("1.5h", 5400),
        (" 2H ", 7200),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert duration_from(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "soon", "2x", "-1h", "0", "1h30", "h", "9" * 40 + "d"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|shorter|long"):
        duration_from(text)


def test_a_problem_shows_its_code_its_first_ten_faults_and_what_to_do() -> None:
    errors = [{"line": n, "code": "invalid_json", "detail": "no value"} for n in range(1, 14)]
    body = {"code": "unsupported_encoding", "detail": "this is UTF-16", "errors": errors}
    error = from_answer(
        status=422,
        content_type="application/problem+json",
        body=json.dumps(body).encode(),
        request_id="req-7",
    )

    text = problem(error)

    assert "error: unsupported_encoding: this is UTF-16 (HTTP 422, request req-7)" in text
    assert "line 10: invalid_json: no value" in text
    assert "line 11" not in text
    assert "… and 3 more" in text
    assert "Save the file as UTF-8." in text


def test_a_fault_of_a_field_names_it() -> None:
    body = {"code": "invalid", "errors": [{"field": "priority", "code": "too_large"}]}
    error = from_answer(
        status=422, content_type="application/problem+json", body=json.dumps(body).encode()
    )

    assert "  priority: too_large" in problem(error)


@given(st.text())
def test_nothing_from_outside_steers_the_terminal(text: str) -> None:
    shown = printable(text)

    assert len(shown) == len(text)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
    shown.encode()


def test_columns_stay_in_line_with_wide_characters() -> None:
    lines = table(("NAME", "N"), [("味噌汁", "1"), ("a", "2")]).splitlines()

    assert lines == ["NAME    N", "味噌汁  1", "a       2"]


def test_fields_without_a_value_are_left_out() -> None:
    assert fields({"id": "x", "none": None, "empty": "", "zero": 0}) == "id    x\nzero  0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_shown_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_estimate_shows_its_range() -> None:
    assert eta(Eta(seconds=60, low=30, high=90)) == "1 min 00 s (30 s to 1 min 30 s)"


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"counts": None, "sources": [], "eta": {}},
        {"counts": {"total": "many"}, "priority": "high", "created_at": "yesterday"},
        {"rater": {"id": "needs_met"}, "new": {}},
    ],
)
def test_a_workflow_of_another_server_version_is_read_as_far_as_it_goes(
    raw: dict[str, object],
) -> None:
    workflow = workflow_from(raw)

    assert workflow.counts.total == 0
    assert workflow.raw is raw
