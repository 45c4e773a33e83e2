"""When an external model is up, by what its server answers."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_admin.policy.health import (
    BELIEVED,
    DOWN_AFTER,
    UP_AFTER,
    Finding,
    Health,
    Reply,
    Sign,
    follow,
    of_oip,
    of_openai,
    rests,
    version_of,
)

START = datetime(2026, 3, 1, tzinfo=UTC)
STEP = timedelta(seconds=10)
SIGNS = {"g": Sign.GOOD, "b": Sign.BAD, "u": Sign.UNTOLD}


def course(signs: Sequence[Sign]) -> list[Health]:
    found: list[Health] = []
    for number, sign in enumerate(signs):
        finding = Finding(sign=sign, detail=sign.value)
        before = found[-1] if found else None
        found.append(follow(before, finding, latency_s=0.1, now=START + number * STEP))
    return found


@pytest.mark.parametrize(
    ("signs", "states"),
    [
        ("g", "+"),
        ("bbb", "??-"),
        ("gbb", "+++"),
        ("gbbb", "+++-"),
        ("gbbgbb", "++++++"),
        ("bbbg", "??--"),
        ("bbbgg", "??--+"),
        ("bbbgbgg", "??----+"),
        ("gu", "+?"),
        ("bbbu", "??-?"),
        ("bbubbb", "?????-"),
        ("ug", "?+"),
    ],
)
def test_it_takes_several_checks_to_go_down_and_to_come_back(signs: str, states: str) -> None:
    shown = {True: "+", False: "-", None: "?"}

    assert "".join(shown[h.up] for h in course([SIGNS[s] for s in signs])) == states


def test_the_change_is_dated_and_the_rest_counted() -> None:
    *_, last = course([SIGNS[s] for s in "gbbbbb"])

    assert last.changed_at == START + 3 * STEP
    assert (last.failures, last.successes, last.checked_at) == (5, 0, START + 5 * STEP)


@given(st.lists(st.sampled_from(Sign), max_size=30))
def test_only_bad_checks_in_a_row_take_a_model_down(signs: list[Sign]) -> None:
    for number, health in enumerate(course(signs)):
        past = signs[: number + 1]
        assert health.failures == 0 or health.successes == 0
        if past[-UP_AFTER:] == [Sign.GOOD] * UP_AFTER:
            assert health.up is True
        if past[-DOWN_AFTER:] == [Sign.BAD] * DOWN_AFTER:
            assert health.up is False
        if past[-1] is Sign.UNTOLD or Sign.BAD not in past:
            assert health.up is not False


def test_what_was_found_long_ago_or_in_the_future_lets_nothing_rest() -> None:
    *_, down = course([Sign.BAD] * DOWN_AFTER)

    assert rests(down, down.checked_at + BELIEVED)
    assert not rests(down, down.checked_at + BELIEVED + STEP)
    assert not rests(down, down.checked_at - BELIEVED - STEP)
    assert not any(rests(h, h.checked_at) for h in course([Sign.GOOD, Sign.UNTOLD, Sign.BAD]))


OK, GONE = Reply(status=200), Reply(fault="connection refused")
NONE = Reply(status=404)


@pytest.mark.parametrize(
    ("server", "model", "metadata", "sign", "words"),
    [
        (OK, OK, OK, Sign.GOOD, "ready"),
        (GONE, GONE, GONE, Sign.BAD, "connection refused"),
        (Reply(status=503), OK, OK, Sign.BAD, "HTTP 503"),
        (Reply(status=400), Reply(status=400), OK, Sign.BAD, "not ready"),
        (OK, Reply(status=503), OK, Sign.BAD, "not ready"),
        (OK, Reply(status=200, body={"ready": False}), OK, Sign.BAD, "not ready"),
        (OK, Reply(status=500), OK, Sign.BAD, "HTTP 500"),
        (OK, NONE, NONE, Sign.UNTOLD, "no model 'm'"),
        (NONE, NONE, OK, Sign.GOOD, "ready"),
        (OK, Reply(status=401), OK, Sign.UNTOLD, "refuses our key"),
        (OK, Reply(status=403), OK, Sign.UNTOLD, "may not ask"),
        (OK, Reply(status=302), OK, Sign.UNTOLD, "redirects"),
        (OK, Reply(status=429), OK, Sign.GOOD, "busy"),
        (OK, Reply(status=418), OK, Sign.UNTOLD, "HTTP 418"),
    ],
)
def test_what_an_oip_server_says(
    server: Reply, model: Reply, metadata: Reply, sign: Sign, words: str
) -> None:
    found = of_oip(server, model, metadata, name="m")

    assert found.sign is sign
    assert words in found.detail


def listing(*names: object) -> Reply:
    return Reply(status=200, body={"data": [{"id": name} for name in names]})


@pytest.mark.parametrize(
    ("models", "health", "sign", "words"),
    [
        (listing("m"), OK, Sign.GOOD, "lists the model"),
        (listing("m"), NONE, Sign.GOOD, "lists the model"),
        (listing("m"), GONE, Sign.GOOD, "lists the model"),
        (listing("m"), Reply(status=503), Sign.BAD, "/health"),
        (listing("a", "b"), OK, Sign.UNTOLD, "no model 'm'; it has a, b"),
        (listing("a", "b", "c", "d"), OK, Sign.UNTOLD, "a, b, c, …"),
        (listing("<script>", "a\nb", 7, None), OK, Sign.UNTOLD, "no model 'm'"),
        (listing(), OK, Sign.UNTOLD, "no model 'm'"),
        (Reply(status=200, body={"data": "x"}), OK, Sign.GOOD, "without a list"),
        (Reply(status=200), OK, Sign.GOOD, "without a list"),
        (GONE, GONE, Sign.BAD, "connection refused"),
        (Reply(status=502), OK, Sign.BAD, "HTTP 502"),
        (Reply(status=401), OK, Sign.UNTOLD, "refuses our key"),
        (Reply(status=403), OK, Sign.UNTOLD, "may not ask"),
        (NONE, OK, Sign.UNTOLD, "no such address"),
        (Reply(status=429), OK, Sign.GOOD, "busy"),
        (Reply(status=301), OK, Sign.UNTOLD, "redirects"),
    ],
)
def test_what_an_openai_compatible_server_says(
    models: Reply, health: Reply, sign: Sign, words: str
) -> None:
    found = of_openai(models, health, name="m")

    assert found.sign is sign
    assert words in found.detail
    assert "<" not in found.detail
    assert found.detail.isprintable()


@pytest.mark.parametrize(
    ("metadata", "version"),
    [
        ({"versions": ["1"]}, "1"),
        ({"model_version": "v2", "versions": ["1"]}, "v2"),
        ({"versions": ["1", "2"]}, ""),
        ({"versions": [1]}, ""),
        ({"versions": None}, ""),
        ({"model_version": "a\nb"}, ""),
        ({}, ""),
    ],
)
def test_the_version_in_metadata(metadata: dict[str, object], version: str) -> None:
    assert version_of(metadata) == version
