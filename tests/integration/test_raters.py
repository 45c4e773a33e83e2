import threading
from typing import Any

import pytest
from django.db import connection
from pytest_django import Settings

from fulfillment import raters
from fulfillment.errors import Conflict, InvalidFields, NotFound, RaterUnavailable
from fulfillment.models import Rater, RaterVersion
from tests import builders
from tests.builders import DIRECTORY, MODEL, NOW, PLUGINS, Model, Plugin


@pytest.fixture(autouse=True)
def _plugins(settings: Settings, db: None) -> None:
    builders.use_plugins(settings)


def unsaved(**changes: Any) -> Rater:
    return Rater(**{"id": "r1", "autorater": "stub", "model_id": MODEL, **changes})


def registered(**changes: Any) -> Rater:
    rater, _ = raters.register(unsaved(**changes), now=NOW)
    return rater


def test_registering_makes_the_first_version() -> None:
    rater, is_new = raters.register(unsaved(key_level="", config={"a": 1e2}), now=NOW)

    assert is_new
    assert rater.key_level == "result"
    assert rater.current_version is not None
    assert rater.current_version.number == 1
    assert rater.current_version.spec == {
        "rater_id": "r1",
        "autorater": "stub",
        "plugin_version": "1",
        "model_id": MODEL,
        "model_version": "v1",
        "key_level": "result",
        "score_min": 0.0,
        "score_max": 4.0,
        "integer_scores": False,
        "prompt_template": "",
        "config": {"a": 100.0},
    }


def test_registering_the_same_again_changes_nothing_and_another_is_a_conflict() -> None:
    registered()

    same, is_new = raters.register(unsaved(), now=NOW)

    assert (same.pk, is_new) == ("r1", False)
    assert RaterVersion.objects.count() == 1
    with pytest.raises(Conflict) as conflict:
        raters.register(unsaved(score_max=5.0), now=NOW)
    assert conflict.value.code == "rater_exists"


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"autorater": "nowhere"}, "autorater", "unknown_autorater"),
        ({"autorater": "nowhere", "key_level": ""}, "autorater", "unknown_autorater"),
        ({"model_id": "nowhere"}, "model", "unknown_model"),
        ({"autorater": "chat"}, "model", "protocol_mismatch"),
        ({"config": {"broken": True}}, "config", "bad_config"),
        ({"config": {"a": ["b\0"]}}, "config", "bad_value"),
        ({"config": {"\ud800": 1}}, "config", "bad_value"),
        ({"config": {"a": 1 << 64}}, "config", "bad_value"),
        ({"score_min": 4.0}, "score_max", "out_of_range"),
        ({"score_max": float("nan")}, "score_max", "out_of_range"),
        ({"batch_size": 61}, "batch_size", "out_of_range"),
        ({"batch_size": 0}, "batch_size", "out_of_range"),
        ({"deadline_s": 0}, "deadline_s", "out_of_range"),
        ({"max_attempts": 0}, "max_attempts", "out_of_range"),
        ({"max_qps": 0.0}, "max_qps", "out_of_range"),
        ({"prompt_template": "x" * 262_145}, "prompt_template", "field_too_long"),
    ],
)
def test_a_rater_that_cannot_work_is_refused_naming_the_field(
    changes: dict[str, Any], field: str, code: str
) -> None:
    with pytest.raises(InvalidFields) as refused:
        raters.register(unsaved(**changes), now=NOW)

    assert [(e["field"], e["code"]) for e in refused.value.errors] == [(field, code)]
    assert not Rater.objects.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key_level", "query"),
        ("score_min", -1.0),
        ("score_max", 5.0),
        ("integer_scores", True),
        ("prompt_template", "Rate it."),
        ("config", {"temperature": 0}),
    ],
)
def test_a_change_that_decides_the_score_makes_a_new_version(name: str, value: Any) -> None:
    first = registered().current_version

    changed = raters.change(rater_id="r1", changes={name: value}, now=NOW)

    assert first is not None
    assert changed.current_version is not None
    assert changed.current_version.number == 2
    assert changed.current_version.spec == {**first.spec, name: value}
    assert {v.number for v in raters.versions("r1")} == {1, 2}


def test_a_change_back_returns_to_the_old_version() -> None:
    registered()
    raters.change(rater_id="r1", changes={"score_max": 5.0}, now=NOW)

    back = raters.change(rater_id="r1", changes={"score_max": 4.0}, now=NOW)

    assert back.current_version is not None
    assert back.current_version.number == 1


def test_other_changes_keep_the_version() -> None:
    registered()

    changed = raters.change(
        rater_id="r1",
        changes={
            "batch_size": 6,
            "freshness_s": 60,
            "deadline_s": 60,
            "max_qps": 2.0,
            "max_attempts": 3,
            "mode": "isolated",
        },
        now=NOW,
    )

    assert changed.current_version is not None
    assert (changed.current_version.number, changed.batch_size) == (1, 6)


def test_a_refused_change_leaves_the_rater_alone() -> None:
    registered()

    with pytest.raises(InvalidFields):
        raters.change(rater_id="r1", changes={"batch_size": 6, "model_id": "nowhere"}, now=NOW)

    assert raters.find("r1").batch_size == 12
    with pytest.raises(NotFound):
        raters.change(rater_id="r2", changes={}, now=NOW)


def test_a_new_plugin_or_checkpoint_makes_a_new_version_when_it_is_asked_for() -> None:
    rater = registered(config={"a": 1.5})
    assert raters.current_version(rater, NOW).number == 1

    DIRECTORY.models[MODEL] = Model(id=MODEL, version="v2")
    second = raters.current_version(rater, NOW)
    PLUGINS["stub"] = Plugin(name="stub", version="2")
    third = raters.current_version(rater, NOW)

    assert (second.number, second.spec["model_version"]) == (2, "v2")
    assert (third.number, third.spec["plugin_version"]) == (3, "2")
    assert raters.find("r1").current_version == third
    assert raters.current_version(raters.find("r1"), NOW) == third


@pytest.mark.parametrize("missing", ["plugin", "model", "protocol"])
def test_a_rater_whose_parts_are_gone_takes_no_workflow(missing: str) -> None:
    rater = registered()
    if missing == "plugin":
        PLUGINS.clear()
    elif missing == "model":
        DIRECTORY.models.clear()
    else:
        DIRECTORY.models[MODEL] = Model(id=MODEL, protocol="openai")

    with pytest.raises(RaterUnavailable) as unavailable:
        raters.current_version(rater, NOW)

    assert len(unavailable.value.errors) == 1


def test_a_pause_keeps_its_first_reason_until_it_is_lifted() -> None:
    registered()

    raters.pause(rater_id="r1", code="unauthorized", detail="401", now=NOW)
    paused = raters.pause(rater_id="r1", code="operator", detail="again", now=NOW)
    resumed = raters.resume(rater_id="r1")

    assert (paused.paused_code, paused.paused_at) == ("unauthorized", NOW)
    assert (resumed.paused_code, resumed.paused_detail, resumed.paused_at) == ("", "", None)


@pytest.mark.django_db(transaction=True)
def test_many_that_meet_a_new_checkpoint_at_once_make_one_version() -> None:
    rater = registered()
    DIRECTORY.models[MODEL] = Model(id=MODEL, version="v2")
    start = threading.Barrier(6)
    found: list[int] = []

    def meet() -> None:
        try:
            start.wait()
            found.append(raters.current_version(Rater.objects.get(pk=rater.pk), NOW).number)
        finally:
            connection.close()

    threads = [threading.Thread(target=meet) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [2] * 6
    assert RaterVersion.objects.count() == 2
