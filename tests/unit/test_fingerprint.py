import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fulfillment.policy.fingerprint import (
    Fingerprinter,
    fingerprint,
    request_digest,
    url_digest,
    version_digest,
)

VERSION = bytes(range(16))
KEY_FIELDS = ("query_text", "url", "title", "html", "text", "context")
RATER_VERSION: Mapping[str, Any] = {
    "rater_id": "nm",
    "model_id": "minilm",
    "model_version": "5d2b",
    "autorater": "needs_met",
    "plugin_version": "1",
    "key_level": "result",
    "prompt_template": "",
    "config": {"device": {"batch": 8}, "limit": 0.5},
    "score_min": 0.0,
    "score_max": 1.0,
    "integer_scores": False,
}

# Few letters and digits, so that shifted boundaries and look-alikes are drawn often.
texts = st.text("ab1\0é", max_size=3)
scalars = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 0.5]) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
items = st.dictionaries(st.sampled_from(KEY_FIELDS), texts | values, max_size=4)


def of(item: Mapping[str, Any]) -> bytes:
    return fingerprint(version_digest=VERSION, item=item, key_fields=KEY_FIELDS)


def typed(value: object) -> object:
    """Return a value that is equal to another's only if JSON tells the two the same."""
    if isinstance(value, Mapping):
        return ("object", frozenset((key, typed(inner)) for key, inner in value.items()))
    if isinstance(value, list):
        return ("list", tuple(typed(inner) for inner in value))
    return (type(value).__name__, repr(value))


@given(one=items, other=items)
def test_items_share_a_fingerprint_exactly_if_they_are_equal(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert (of(one) == of(other)) == (typed(one) == typed(other))


@given(text=st.text(min_size=1), first=st.integers(0), second=st.integers(0))
def test_text_that_moves_over_a_field_boundary_is_another_item(
    text: str, first: int, second: int
) -> None:
    first, second = first % (len(text) + 1), second % (len(text) + 1)
    assume(first != second)

    assert of({"query_text": text[:first], "url": text[first:]}) != of(
        {"query_text": text[:second], "url": text[second:]}
    )


@given(text=st.text())
def test_the_field_that_has_a_text_counts(text: str) -> None:
    assert of({"query_text": "q", "title": text}) != of({"query_text": "q", "text": text})


@pytest.mark.parametrize("field", KEY_FIELDS)
def test_absent_empty_and_null_differ(field: str) -> None:
    assert len({of({}), of({field: ""}), of({field: None})}) == 3


LOOK_ALIKES: list[Any] = ["1", 1, 1.0, True, 1.5, "1.0", "true", None, "null", "", [], {}, "{}"]


def test_look_alikes_of_different_types_differ_as_fields() -> None:
    assert len({of({"text": value}) for value in LOOK_ALIKES}) == len(LOOK_ALIKES)


def test_look_alikes_of_different_types_differ_inside_context() -> None:
    assert len({of({"context": {"a": value}}) for value in LOOK_ALIKES}) == len(LOOK_ALIKES)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("0.1", "0.10000000000000002"),
        ("-0.0", "0.0"),
        ("1e2", "100"),
        ("9007199254740993", "9007199254740992"),
    ],
)
def test_number_tokens_that_parse_apart_differ(one: str, other: str) -> None:
    assert of({"context": json.loads(one)}) != of({"context": json.loads(other)})


@given(context=st.dictionaries(st.text(), values, min_size=2))
def test_the_order_of_keys_in_context_is_irrelevant(context: dict[str, Any]) -> None:
    turned = dict(reversed(context.items()))

    assert of({"context": turned}) == of({"context": context})


@given(item=items, name=st.text(), value=values)
def test_other_fields_do_not_count(item: dict[str, Any], name: str, value: object) -> None:
    assume(name not in KEY_FIELDS)

    assert of({**item, name: value}) == of(item)


def test_fields_of_an_item_may_come_in_any_order() -> None:
    assert of({"url": "u", "query_text": "q"}) == of({"query_text": "q", "url": "u"})


@pytest.mark.parametrize("fields", [("query_text",), ("query_text", "url"), ("url", "query_text")])
def test_the_choice_of_key_fields_counts(fields: tuple[str, ...]) -> None:
    item = {"query_text": "q", "url": "q"}

    assert fingerprint(version_digest=VERSION, item=item, key_fields=fields) != of(item)


def test_text_is_taken_as_sent() -> None:
    composed, decomposed = "\u00e9", "e\u0301"

    assert of({"query_text": composed}) != of({"query_text": decomposed})
    assert of({"query_text": "a "}) != of({"query_text": "a"})


@given(drawn=st.lists(items, min_size=1, max_size=4))
def test_a_fingerprinter_carries_nothing_from_row_to_row(drawn: list[dict[str, Any]]) -> None:
    of_version = Fingerprinter(version_digest=VERSION, key_fields=KEY_FIELDS)

    assert [of_version(item) for item in drawn] == [of(item) for item in drawn]


def test_a_number_that_json_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        of({"context": {"a": float("nan")}})


def test_a_version_digest_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        Fingerprinter(version_digest=b"abc", key_fields=KEY_FIELDS)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("rater_id", "nm2"),
        ("model_id", "large"),
        ("model_version", "5d2c"),
        ("autorater", "oip_score"),
        ("plugin_version", "2"),
        ("key_level", "query"),
        ("prompt_template", "Rate {text}"),
        ("config", {}),
        ("score_min", -1.0),
        ("score_max", 5.0),
        ("integer_scores", True),
    ],
)
def test_all_that_decides_a_score_makes_another_version(field: str, other: object) -> None:
    assert version_digest(**{**RATER_VERSION, field: other}) != version_digest(**RATER_VERSION)


def test_another_version_is_another_fingerprint() -> None:
    other = version_digest(**RATER_VERSION)

    assert fingerprint(version_digest=other, item={"text": "t"}, key_fields=KEY_FIELDS) != of(
        {"text": "t"}
    )


def test_a_whole_number_as_score_limit_is_the_same_version() -> None:
    whole = {**RATER_VERSION, "score_min": 0, "score_max": 1}

    assert version_digest(**whole) == version_digest(**RATER_VERSION)


@given(one=st.text(), other=st.text())
def test_digests_of_different_texts_differ(one: str, other: str) -> None:
    assert (request_digest(one) == request_digest(other)) == (one == other)
    assert (url_digest(one) == url_digest(other)) == (one == other)


@given(text=st.text())
def test_digests_of_different_kinds_differ(text: str) -> None:
    assert request_digest(text) != url_digest(text)


# Golden values: a change here empties every archive and breaks running workflows.


@pytest.mark.parametrize(
    ("item", "golden"),
    [
        ({}, "ac3dc983b83226d4c04d7bd9a4bfc1dd"),
        (
            {"query_text": "hiking boots", "url": "https://example.com/"},
            "6f6a49b47d4d35a59cdf8413e607383b",
        ),
        (
            {"query_text": "ботинки", "text": "", "context": {"b": 1, "a": [1.0, True, None]}},
            "92ba16bd493ffe4b53bd97f53a034d22",
        ),
    ],
)
def test_fingerprints_stay_what_they_were(item: dict[str, Any], golden: str) -> None:
    assert of(item).hex() == golden


def test_digests_stay_what_they_were() -> None:
    assert version_digest(**RATER_VERSION).hex() == "a4359de4faf9dd62ea49220db61acb40"
    assert request_digest("row-1").hex() == "45695061dffe11582df3cbebe7acc65d"
    assert url_digest("https://example.com/").hex() == "013245e0524c8529207bdc7440623356"
