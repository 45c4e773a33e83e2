"""What the sample workflow promises: rows enough, both sides, repeats, languages, a HTML page."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

SAMPLE = Path(__file__).parents[2] / "samples" / "needs_met.jsonl"
KEY_FIELDS = ("query_text", "url", "title", "html", "text", "context")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in SAMPLE.read_bytes().removesuffix(b"\n").split(b"\n")]


def by_query(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    queries: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        queries[row["query_id"]].append(row)
    return queries


def key(row: dict[str, Any]) -> str:
    return json.dumps([row.get(name) for name in KEY_FIELDS])


def test_there_are_at_least_300_rows_of_30_queries(rows: list[dict[str, Any]]) -> None:
    assert len(rows) >= 300
    assert len(by_query(rows)) == 30
    assert {len({row["query_text"] for row in group}) for group in by_query(rows).values()} == {1}
    assert all(8 <= len(group) <= 14 for group in by_query(rows).values())


def test_each_row_can_be_rated(rows: list[dict[str, Any]]) -> None:
    assert all(row["query_text"].strip() for row in rows)
    assert all(bool(row.get("text")) != bool(row.get("html")) for row in rows)
    assert all(row["title"].strip() for row in rows)


def test_request_ids_are_unique(rows: list[dict[str, Any]]) -> None:
    assert len({row["request_id"] for row in rows}) == len(rows)


def test_each_query_has_both_sides_with_weights_that_fall_by_rank(
    rows: list[dict[str, Any]],
) -> None:
    for group in by_query(rows).values():
        for side in ("test", "base"):
            weights = [row["result_weight"] for row in group if row["side"] == side]
            assert len(weights) >= 5
            assert weights == sorted(set(weights), reverse=True)


def test_some_rows_are_equal_but_for_id_and_side(rows: list[dict[str, Any]]) -> None:
    seen = Counter(key(row) for row in rows)

    assert sum(count - 1 for count in seen.values()) >= 30
    assert len(seen) >= 200


def test_one_result_id_is_one_content(rows: list[dict[str, Any]]) -> None:
    contents = {(row["result_id"], key(row)) for row in rows}

    assert len(contents) == len({row["result_id"] for row in rows})


def test_each_query_has_results_of_obviously_different_quality(
    rows: list[dict[str, Any]],
) -> None:
    for group in by_query(rows).values():
        assert {row["expected_quality"] for row in group} == {
            "perfect",
            "good",
            "partial",
            "off_topic",
            "spam",
        }


def test_a_part_is_not_english(rows: list[dict[str, Any]]) -> None:
    languages = {row["language"] for row in rows}

    assert {"de", "fr", "es", "ja", "zh"} <= languages
    assert any("味噌汁" in row["query_text"] for row in rows)


def test_a_result_is_a_html_page_with_script_and_style(rows: list[dict[str, Any]]) -> None:
    pages = [row["html"] for row in rows if "html" in row]

    assert any("<script>" in page and "<style>" in page for page in pages)


def test_addresses_belong_to_nobody(rows: list[dict[str, Any]]) -> None:
    hosts = {urlsplit(row["url"]).hostname or "" for row in rows}

    assert all(host.endswith((".example.org", ".example.com", ".example.net")) for host in hosts)
