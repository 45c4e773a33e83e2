"""Array literals come back from PostgreSQL as what went in."""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from fulfillment import arrays
from fulfillment.policy.lifecycle import RequestState

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def read_back(literal: str, kind: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT %s::{kind}[]", [literal])
        (values,) = cursor.fetchone()
    return list(values)


class Laws(TestCase):
    @given(st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1)))
    def test_integers(self, values: list[int | None]) -> None:
        assert read_back(arrays.integers(values), "bigint") == values

    @given(st.lists(st.none() | st.floats(allow_nan=False)))
    def test_floats_to_the_last_bit(self, values: list[float | None]) -> None:
        assert read_back(arrays.floats(values), "float8") == values

    @given(st.lists(st.none() | TEXT))
    def test_texts_whatever_they_hold(self, values: list[str | None]) -> None:
        assert read_back(arrays.texts(values), "text") == values

    @given(st.lists(st.booleans()))
    def test_booleans(self, values: list[bool]) -> None:
        assert read_back(arrays.booleans(values), "bool") == values

    @given(st.lists(st.none() | st.datetimes(timezones=st.just(UTC))))
    def test_instants_to_the_microsecond(self, values: list[datetime | None]) -> None:
        assert read_back(arrays.instants(values), "timestamptz") == values


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("literal", "kind", "expected"),
    [
        (arrays.integers([RequestState.FAILED, None]), "smallint", [RequestState.FAILED, None]),
        (arrays.integers([True, False]), "smallint", [1, 0]),
        (arrays.texts(["NULL", "", "{}", None]), "text", ["NULL", "", "{}", None]),
        (arrays.floats([math.inf, -math.inf]), "float8", [math.inf, -math.inf]),
    ],
)
def test_special_values_keep_their_meaning(
    literal: str, kind: str, expected: Sequence[Any]
) -> None:
    assert read_back(literal, kind) == expected


@pytest.mark.django_db
def test_uuids_are_given_as_hex_digits() -> None:
    one = "00112233445566778899aabbccddeeff"

    with connection.cursor() as cursor:
        cursor.execute("SELECT unnest(%s::uuid[])", [arrays.uuids([one, None])])

        assert [row[0] for row in cursor.fetchall()] == [UUID(one), None]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "literal_of",
    [arrays.integers, arrays.floats, arrays.uuids, arrays.instants, arrays.booleans, arrays.texts],
)
def test_no_values_make_an_empty_array(literal_of: Callable[[list[Any]], str]) -> None:
    assert literal_of([]) == "{}"
