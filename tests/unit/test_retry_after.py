from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.model_client import LONGEST_S, parse_retry_after

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        ("2", 2.0),
        ("0", 0.0),
        (" 2.5 ", 2.5),
        ("99999999999999999999", 1_800.0),
        ("9" * 400, 1_800.0),
        ("Tue, 01 Jan 2030 12:00:05 GMT", 5.0),
        ("Tuesday, 01-Jan-30 12:00:05 GMT", 5.0),
        ("Tue Jan  1 12:00:05 2030", 5.0),
        ("Tue, 01 Jan 2030 14:00:05 +0200", 5.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 1_800.0),
    ],
)
def test_seconds_and_dates_are_a_floor_up_to_half_an_hour(value: str, wait_s: float) -> None:
    assert parse_retry_after(value, NOW) == wait_s


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "soon",
        "-5",
        "1e3",
        "0x10",
        "\u0665",
        "nan",
        "inf",
        "5, 10",
        "Tue, 01 Jan 2030 11:59:59 GMT",
        "Tue, 01 Jan 2030 12:00:00 GMT",
        "Fri, 31 Dec 99999 23:59:59 GMT",
        "Tue, 41 Jan 2030 12:00:05 GMT",
    ],
)
def test_rubbish_and_what_is_past_say_nothing(value: str | None) -> None:
    assert parse_retry_after(value, NOW) is None


@given(
    st.one_of(
        st.text(),
        st.integers().map(str),
        st.floats().map(str),
        st.from_regex(r"\w{3}, \d{1,3} \w{3} \d{1,6} \d\d:\d\d:\d\d [+-]?\w{1,5}", fullmatch=True),
    )
)
def test_no_header_raises_or_leads_out_of_bounds(value: str) -> None:
    wait_s = parse_retry_after(value, NOW)

    assert wait_s is None or 0 <= wait_s <= LONGEST_S


# From 1900 on: the HTTP grammar reads the year 68 as 2068.
@given(st.datetimes(timezones=st.just(UTC)).filter(lambda until: until.year >= 1900))
def test_a_date_means_the_time_until_then(until: datetime) -> None:
    until = until.replace(microsecond=0)

    wait_s = parse_retry_after(format_datetime(until, usegmt=True), NOW)

    left_s = (until - NOW) / timedelta(seconds=1)
    assert wait_s == (min(left_s, LONGEST_S) if left_s > 0 else None)
