"""CA-01 and CA-05: what a key must hold, and two workflows that ask for the same at once.

The cases lie beside the repository (`../shared/cases`); the rows used here without them are ours.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from fulfillment import control, leases, raters
from fulfillment.clock import database_now
from fulfillment.leases import Finish
from fulfillment.models import Rater, Workflow
from fulfillment.policy.lifecycle import WorkflowState
from tests import builders
from tests.builders import DIRECTORY, MODEL, PLUGINS, RATER, Api, Model, Plugin, row
from tests.rating_queue import (
    Queue,
    Replica,
    boot,
    check_all,
    counts_add_up,
    end_pauses,
    queue,
    rated,
    sent_items,
    take,
)

pytestmark = pytest.mark.django_db

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"


def case(name: str, file: str) -> Path:
    path = CASES / name / file
    if not path.exists():
        pytest.skip(f"{path.parent.name}/{file} is not beside the repository")
    return path


@pytest.fixture(autouse=True)
def _plugins(settings: Settings, db: None, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    settings.AIRS_SHADOW_REFRESH = 0.0
    builders.use_plugins(settings)


# CA-01: everything that decides a score is in the key, and nothing else


class Service:
    """A service whose rater, model and plug-in can be changed between one request and the next."""

    def __init__(self) -> None:
        self._api = Api("alice")
        self._executor = boot()

    def ask(self, setting: Mapping[str, Any]) -> bool:
        """Set the service up so, submit the row and rate it; say whether it was a hit."""
        model_id, version = setting["model_id"], setting["model_version"]
        if digest := setting.get("checkpoint_digest"):
            version = f"{version}+{digest}"
        DIRECTORY.models[model_id] = Model(id=model_id, version=version)
        PLUGINS["stub"] = Plugin(name="stub", version=setting.get("plugin_version", "1"))
        low, high = setting["score_range"]
        settings_ = {
            "model_id": model_id,
            "prompt_template": f"prompt {setting['prompt_version']}",
            "config": {"temperature": setting["temperature"]},
            "score_min": float(low),
            "score_max": float(high),
        }
        rater_id, now = setting["rater_id"], database_now()
        if Rater.objects.filter(pk=rater_id).exists():
            raters.change(rater_id=rater_id, changes=settings_, now=now)
        else:
            raters.register(Rater(id=rater_id, autorater="stub", **settings_), now=now)
        asked = {name: setting[name] for name in ("priority", "batch_size") if name in setting}
        request = {**setting["row"], "request_id": setting.get("request_id", "r")}
        answer = self._api.post(
            "/workflows", {"rater": rater_id, "requests": [request], **asked}
        ).json()
        assert answer["accepted"] == 1, answer
        computed = self._rate(model_id, version)
        assert computed == answer["pending"] == 1 - answer["hits"]
        return bool(answer["hits"])

    def _rate(self, model_id: str, version: str) -> int:
        boot(plugins={"stub": PLUGINS["stub"].version})
        running = queue(Replica(key=model_id, model_id=model_id, version=version))
        computed = 0
        for _ in range(3):
            running.wake_and_run()
            for message in running.take_sent():
                for taken in take(message, by=self._executor):
                    leases.finish([rated(taken)])
                    computed += len(sent_items(taken))
        return computed


def with_change(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    changed = deepcopy(dict(base))
    for name, value in change.items():
        outer, _, inner = name.partition(".")
        if inner:
            changed[outer][inner] = value
        else:
            changed[outer] = value
    return changed


OURS: Mapping[str, Any] = {
    "rater_id": "quality",
    "model_id": "encoder",
    "model_version": "7",
    "prompt_version": "1",
    "temperature": 0,
    "score_range": [0, 4],
    "row": {
        "query_text": "tea",
        "url": "https://tea.example/1",
        "title": "Tea",
        "html": "<p>tea</p>",
        "text": "tea",
        "context": {"country": "at", "device": "phone"},
    },
}
DECIDE: Sequence[Mapping[str, Any]] = [
    {"rater_id": "other"},
    {"model_id": "encoder-2"},
    {"model_version": "8"},
    {"checkpoint_digest": "sha256:1f"},
    {"plugin_version": "2"},
    {"prompt_version": "2"},
    {"temperature": 0.5},
    {"score_range": [0, 5]},
    {"score_range": [-1, 4]},
    {"row.query_text": "tea "},
    {"row.url": "https://tea.example/1/"},
    {"row.title": "tea"},
    {"row.html": "<p>tea</p> "},
    {"row.text": "Tea"},
    {"row.text": ""},
    {"row.context": {"country": "at"}},
    {"row.context": {"country": "at", "device": "phone", "page": 1}},
]
DO_NOT: Sequence[Mapping[str, Any]] = [
    {},
    {"priority": 90},
    {"batch_size": 1},
    {"request_id": "another"},
    {"row.query_id": "q9"},
    {"row.result_id": "d9"},
    {"row.side": "test"},
    {"row.result_weight": 0.5},
    {"row.colour": "red"},
    {"row.context": {"device": "phone", "country": "at"}},
]


@pytest.mark.parametrize("change", DECIDE, ids=str)
def test_a_change_of_what_decides_the_score_is_a_miss_and_going_back_a_hit(
    change: Mapping[str, Any],
) -> None:
    service = Service()
    assert not service.ask(OURS)

    changed = with_change(OURS, change)

    assert not service.ask(changed)
    assert service.ask(changed)
    assert service.ask(OURS)


def test_a_change_of_anything_else_is_a_hit() -> None:
    service = Service()
    assert not service.ask(OURS)

    for change in DO_NOT:
        assert service.ask(with_change(OURS, change)), change


def test_the_steps_of_ca_01() -> None:
    steps = json.loads(case("CA-01", "steps.json").read_text())
    service = Service()

    found = [
        "hit" if service.ask(with_change(steps["base"], step["change"])) else "miss"
        for step in steps["steps"]
    ]

    assert found == [step["expect"] for step in steps["steps"]]


# CA-05: two workflows ask for the same rows at the same moment


def pair() -> list[dict[str, Any]]:
    path = CASES / "CA-05" / "pair.jsonl"
    if path.exists():
        return [json.loads(line) for line in path.read_text().splitlines()]
    return [row(n) for n in range(120)]


@pytest.fixture
def both() -> tuple[Workflow, Workflow]:
    """Two workflows of the same 120 rows, taken in one after the other before any is rated."""
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())
    rows = pair()
    made = []
    for owner in ("alice", "bob"):
        answer = Api(owner).upload(f"/workflows?rater={RATER}", rows).json()
        assert (answer["accepted"], answer["hits"]) == (120, 0)
        made.append(Workflow.objects.get(public_id=answer["id"]))
    return made[0], made[1]


def run(running: Queue, *, failing: int = 0) -> int:
    """Rate until nothing is left; the first `failing` items fail once. Return the items asked."""
    executor, asked = boot(), 0
    for _ in range(60):
        end_pauses()
        running.wake_and_run()
        messages = running.take_sent()
        if not messages:
            break
        for message in messages:
            finishes = []
            for taken in take(message, by=executor):
                items = sent_items(taken)
                asked += len(items)
                bad, failing = items[:failing], failing - len(items[:failing])
                finish = rated(taken, *[i for i in items if i not in bad])
                if bad:
                    scored = {i: s for i, s in finish.scored.items() if i not in bad}
                    finish = Finish(taken=taken, scored=scored, not_before=database_now(), calls=1)
                finishes.append(finish)
            leases.finish(finishes)
    check_all()
    return asked


def scores(of: Workflow) -> dict[str, float]:
    answer = Api(of.owner).get(f"/workflows/{of.public_id}/ratings")
    return {r["request_id"]: r["score"] for r in builders.records(answer)}


def completed(workflows: Sequence[Workflow]) -> list[int]:
    return [int(counts_add_up(workflow)["completed"]) for workflow in workflows]


def test_equal_rows_of_two_workflows_are_rated_once(both: tuple[Workflow, Workflow]) -> None:
    asked = run(queue())

    assert asked == 120
    assert completed(both) == [120, 120]
    assert scores(both[0]) == scores(both[1])
    assert [Workflow.objects.get(pk=w.pk).state for w in both] == [WorkflowState.COMPLETED] * 2


def test_what_fails_for_the_leader_is_asked_again_and_not_failed_for_the_follower(
    both: tuple[Workflow, Workflow],
) -> None:
    asked = run(queue(), failing=12)

    assert 120 < asked <= 132
    assert completed(both) == [120, 120]


@pytest.mark.parametrize("when", ["before it is sent", "while it is computed"])
def test_the_follower_is_rated_when_the_leader_is_cancelled(
    both: tuple[Workflow, Workflow], when: str
) -> None:
    leader, follower = both
    running = queue()
    boot()
    if when == "while it is computed":
        running.run()
    control.cancel(workflow_id=leader.pk)

    asked = run(running)

    assert completed([follower]) == [120]
    assert asked <= 240
    assert Workflow.objects.get(pk=follower.pk).state == WorkflowState.COMPLETED
    assert Workflow.objects.get(pk=leader.pk).state == WorkflowState.CANCELLED
