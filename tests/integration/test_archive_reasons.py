"""Why a request hit, missed or waited (I7), as stored with it, and what enters its key."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from fulfillment import documents, intake, leases, raters
from fulfillment.clock import database_now
from fulfillment.errors import InvalidFields
from fulfillment.models import Batch, BatchPayload, Rater, Rating, RatingRequest, Workflow
from fulfillment.policy.freshness import Look
from tests import builders
from tests.builders import MODEL, PLUGINS, RATER, Api, Plugin, ndjson, row
from tests.rating_queue import boot, queue, rate_all, rated, take

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    settings.AIRS_SHADOW_REFRESH = 0.0
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())


def submit(rows: Sequence[Any], **form: Any) -> Workflow:
    return intake.submit(
        form=intake.WorkflowForm(**{"rater": RATER, **form}),
        body=intake.Body(chunks=[ndjson(rows)]),
        owner="alice",
        idempotency_key=None,
        close=True,
    ).workflow


def rate(rows: Sequence[Any], **form: Any) -> Workflow:
    workflow = submit(rows, **form)
    rate_all(queue(), boot())
    return workflow


def records(of: Workflow) -> list[dict[str, Any]]:
    return builders.records(Api("alice").get(f"/workflows/{of.public_id}/ratings"))


def reasons(of: Workflow) -> list[tuple[Any, ...]]:
    return [(r["source"], r["look"], r["rated_by"]) for r in records(of)]


def grow_old(seconds: int) -> None:
    for rating in Rating.objects.all():
        rating.produced_at -= timedelta(seconds=seconds)
        rating.save()


def test_each_record_says_what_the_archive_had_and_whose_rating_it_got() -> None:
    first = rate([row(1), {**row(1), "request_id": "again"}, row(2)])
    second = rate([row(2), row(3)])

    assert reasons(first) == [
        ("model", "miss", first.public_id),
        ("coalesced", "miss", first.public_id),
        ("model", "miss", first.public_id),
    ]
    assert reasons(second) == [
        ("archive", "hit", first.public_id),
        ("model", "miss", second.public_id),
    ]


def test_a_stale_entry_is_told_from_none() -> None:
    rate([row(1)])
    grow_old(3_600)

    strict = rate([row(1), row(2)], max_age_s=60)
    lax = submit([row(1)])

    assert [(source, look) for source, look, _ in reasons(strict)] == [
        ("model", "stale"),
        ("model", "miss"),
    ]
    assert reasons(lax) == [("archive", "hit", strict.public_id)]


def test_being_read_or_copied_does_not_make_a_rating_younger() -> None:
    first = rate([row(1)])
    grow_old(80 * 86_400)
    copied = submit([row(1)])
    grow_old(11 * 86_400)

    again = submit([row(1)])

    assert reasons(copied) == [("archive", "hit", first.public_id)]
    assert Rating.objects.count() == 1
    assert reasons(again) == [(None, "stale", None)]


def test_an_entry_of_the_far_future_or_not_to_be_reused_is_none() -> None:
    rate([row(1)], no_store=True)
    rate([row(2)])
    Rating.objects.filter(reusable=True).update(produced_at=database_now() + timedelta(hours=1))

    assert [r["look"] for r in records(submit([row(1), row(2)]))] == ["miss", "miss"]


def test_bypassing_is_a_reason_of_its_own() -> None:
    rate([row(1)])

    workflow = rate([row(1)], bypass=True)

    assert reasons(workflow) == [("model", "bypassed", workflow.public_id)]


def test_who_waited_for_an_equal_item_says_for_whose() -> None:
    leader, follower = submit([row(1)]), submit([row(1), row(2)])
    dispatcher, executor = queue(), boot()
    dispatcher.wake_and_run()
    for message in dispatcher.take_sent():
        leases.finish([rated(t) for t in take(message, by=executor)])
    rate_all(dispatcher, executor)

    assert reasons(follower) == [
        ("coalesced", "miss", leader.public_id),
        ("model", "miss", follower.public_id),
    ]


def test_what_nobody_has_rated_has_no_source() -> None:
    assert reasons(submit([row(1)])) == [(None, "miss", None)]


def test_the_record_holds_what_is_not_ours_and_the_row_the_digest_of_its_url() -> None:
    workflow = submit([{**row(1), "shelf": {"n": 1}}, {"query_text": "no url"}])

    assert [r["extra"] for r in records(workflow)] == [{"shelf": {"n": 1}}, None]
    first, second = RatingRequest.objects.order_by("pk")
    assert first.url_digest is not None
    assert second.url_digest is None
    assert first.look == Look.MISS


# Key levels


def levelled(level: str, *, prompt: Any = None, rater_id: str = "keyed") -> None:
    PLUGINS["keyed"] = Plugin(name="keyed", prompt=prompt)
    raters.register(
        Rater(id=rater_id, autorater="keyed", model_id=MODEL, key_level=level), now=database_now()
    )


def fingerprints(*rows: Mapping[str, Any]) -> list[str]:
    requests = RatingRequest.objects.filter(workflow=submit(rows, rater="keyed"))
    return [request.fingerprint.hex for request in requests.order_by("pk")]


def payload() -> Any:
    return documents.unpack(bytes(BatchPayload.objects.latest("batch_id").data))


def test_at_level_query_only_the_query_counts_and_reaches_the_plug_in() -> None:
    levelled("query")
    context = {"locale": "de"}

    one, same, other, elsewhere = fingerprints(
        {"query_text": "q", "url": "https://a.example", "text": "a", "context": context},
        {"query_text": "q", "url": "https://b.example", "text": "b", "context": context},
        {"query_text": "r", "url": "https://a.example", "text": "a", "context": context},
        {"query_text": "q", "url": "https://a.example", "text": "a"},
    )

    assert one == same
    assert len({one, other, elsewhere}) == 3
    assert [item for item, _ in payload()] == [
        {"query_text": "q", "context": context},
        {"query_text": "r", "context": context},
        {"query_text": "q"},
    ]
    assert sum(len(batch.fingerprints) for batch in Batch.objects.all()) == 3


def test_at_level_prompt_the_prompt_decides_and_the_plug_in_gets_all_fields() -> None:
    def prompt(item: Mapping[str, Any], spec: Any) -> str:
        return f"{spec.prompt_template}: {item['query_text']} / {item.get('text', '').strip()}"

    levelled("prompt", prompt=prompt)

    one, same, other = fingerprints(
        {"query_text": "q", "url": "https://a.example", "text": "a"},
        {"query_text": "q", "url": "https://b.example", "text": "a "},
        {"query_text": "q", "url": "https://a.example", "text": "b"},
    )

    assert one == same
    assert one != other
    assert payload()[0][0] == {"query_text": "q", "url": "https://a.example", "text": "a"}


def test_a_row_that_the_plug_in_cannot_render_does_not_sink_its_neighbours() -> None:
    def prompt(item: Mapping[str, Any], spec: Any) -> str:
        return json.dumps(item["text"])

    levelled("prompt", prompt=prompt)

    found = fingerprints({"query_text": "q"}, {"query_text": "q", "text": "a"}, {"query_text": "r"})

    assert len(set(found)) == 3


def test_levels_never_share_a_key() -> None:
    levels = ("result", "query", "prompt")
    for level in levels:
        levelled(level, prompt=lambda item, spec: str(item["query_text"]), rater_id=level)

    workflows = [submit([{"query_text": "q"}], rater=level) for level in levels]

    found = RatingRequest.objects.filter(workflow__in=workflows)
    assert len({request.fingerprint for request in found}) == 3


def test_a_plug_in_without_prompt_cannot_be_keyed_by_it() -> None:
    with pytest.raises(InvalidFields) as refused:
        levelled("prompt")

    assert [(e["field"], e["code"]) for e in refused.value.errors] == [
        ("key_level", "not_supported")
    ]
