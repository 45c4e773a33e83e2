"""Rules for priorities: edited by operators, applied when a priority is set."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from fulfillment import bell, control, dispatch, intake, leases, priority_rules, raters
from fulfillment.clock import database_now
from fulfillment.intake import Body, WorkflowForm
from fulfillment.models import PriorityRule, Rater, RaterVersion, Role, Workflow
from fulfillment.policy.priority import PriorityClass
from tests import builders
from tests.builders import MODEL, RATER, Api
from tests.rating_queue import Replica, boot, queue, rated, take
from tests.rating_queue import submit as queued

pytestmark = pytest.mark.django_db

LIST = "/admin/fulfillment/priorityrule/"
TUNING = {"name": "automatic tuning", "trigger": "automatic", "default_score": 40, "ceiling": 60}


@pytest.fixture(autouse=True)
def _rater(settings: Settings, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())


@pytest.fixture
def operator() -> Api:
    return Api("root", Role.OPERATOR)


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    return client


def rule(**changes: Any) -> PriorityRule:
    made, _ = priority_rules.create({**TUNING, **changes})
    return made


def submitted(api: Api, key: str = "", **fields: Any) -> Any:
    body = {"rater": RATER, "requests": [builders.row()], **fields}
    response = api.post("/workflows", body, **({"Idempotency_Key": key} if key else {}))
    assert response.status_code == 202, response.content
    return response.json()


def told(document: Any) -> tuple[int, int | None, str]:
    return document["priority"], document["priority_asked"], document["priority_reason"]


# When a workflow is made


def test_without_rules_a_workflow_gets_what_it_asks_for_or_50() -> None:
    api = Api()

    assert told(submitted(api)) == (50, None, "no priority asked, 50 given: no rule applies")
    assert told(submitted(api, priority=100)) == (
        100, 100, "priority 100 asked, 100 given: no rule applies",
    )  # fmt: skip


def test_a_wish_above_the_ceiling_is_clipped_and_told_why() -> None:
    rule()
    api = Api()

    answer = submitted(api, trigger="automatic", priority=90)

    expected = (60, 90, "priority 90 asked, 60 given: rule 'automatic tuning' has a ceiling of 60")
    assert told(answer) == expected
    assert told(api.get(f"/workflows/{answer['id']}").json()) == expected
    assert told(submitted(api, trigger="automatic")) == (
        40, None, "no priority asked, 40 given: the default of rule 'automatic tuning'",
    )  # fmt: skip
    assert told(submitted(api, priority=90))[0] == 90


def test_files_and_empty_workflows_go_by_the_rules_as_well() -> None:
    rule(trigger="")
    api = Api()

    file = api.upload(f"/workflows?rater={RATER}&priority=90", [builders.row()])
    empty = api.post("/workflows", {"rater": RATER, "priority": 90})

    assert [told(a.json())[:2] for a in (file, empty)] == [(60, 90)] * 2


def test_best_effort_stays_below_all_classes_whatever_a_rule_gives() -> None:
    rule(trigger="", default_score=90, ceiling=100)

    submitted(Api(), best_effort=True)

    workflow = Workflow.objects.get()
    boot()
    dispatcher = queue(Replica(version="v1"))
    dispatcher.run()
    assert (workflow.priority, workflow.best_effort) == (90, True)
    assert [message.priority for message in dispatcher.sent] == [9]


def test_higher_rights_meet_a_rule_that_lower_ones_miss() -> None:
    rule(name="operators", trigger="", min_role=Role.OPERATOR, default_score=70, ceiling=100)
    rule(name="everybody", trigger="")

    scores = {
        role: submitted(Api("u", role), priority=90)["priority"]
        for role in (Role.SUBMITTER, Role.OPERATOR, Role.ADMIN)
    }

    assert scores == {Role.SUBMITTER: 60, Role.OPERATOR: 90, Role.ADMIN: 90}


def test_a_rule_may_name_an_owner_and_a_rater_and_be_switched_off() -> None:
    raters.register(Rater(id="other", autorater="stub", model_id=MODEL), now=database_now())
    named = rule(trigger="", owner="alice", rater_id=RATER)

    clipped = [
        submitted(Api("alice"), priority=90)["priority"],
        submitted(Api("bob"), priority=90)["priority"],
        submitted(Api("alice"), priority=90, rater="other")["priority"],
    ]
    priority_rules.change(named.pk, {"enabled": False})

    assert clipped == [60, 90, 90]
    assert submitted(Api("alice"), priority=90)["priority"] == 90


def test_a_new_checkpoint_launch_is_known_by_the_age_of_the_checkpoint_not_of_the_version() -> None:
    rule(
        name="new checkpoints", trigger="", purpose="launch", max_checkpoint_age_s=7 * 86_400,
        default_score=80, ceiling=95,
    )  # fmt: skip
    api = Api()
    first = submitted(api, purpose="launch")["priority"]
    RaterVersion.objects.update(created_at=database_now() - timedelta(days=8))

    old_checkpoint = submitted(api, purpose="launch")["priority"]
    raters.change(rater_id=RATER, changes={"config": {"k": 1}}, now=database_now())
    new_prompt = submitted(api, purpose="launch")
    builders.DIRECTORY.models[MODEL].version = "v2"
    new_checkpoint = submitted(api, purpose="launch")

    assert (first, old_checkpoint) == (80, 50)
    assert (new_prompt["priority"], new_prompt["rater_version"]) == (50, f"{RATER}@2")
    assert (new_checkpoint["priority"], new_checkpoint["rater_version"]) == (80, f"{RATER}@3")
    assert submitted(api)["priority"] == 50


def test_making_a_workflow_reads_the_rules_once_and_the_checkpoint_only_if_one_asks() -> None:
    def reads() -> tuple[int, int]:
        with CaptureQueriesContext(connection) as captured:
            submitted(Api(), priority=90)
        statements = [q["sql"] for q in captured.captured_queries]
        return (
            sum('FROM "fulfillment_priorityrule"' in sql for sql in statements),
            sum('MIN("fulfillment_raterversion"' in sql for sql in statements),
        )

    rule()
    without = reads()
    rule(name="new", purpose="launch", max_checkpoint_age_s=60)

    assert (without, reads()) == ((1, 0), (1, 1))


def test_the_same_key_answers_the_first_decision_whatever_the_rules_say_later() -> None:
    api = Api()
    first = submitted(api, "k", priority=90)
    rule(trigger="")

    again = submitted(api, "k", priority=90)

    assert again["id"] == first["id"]
    assert told(again) == told(first) == (90, 90, "priority 90 asked, 90 given: no rule applies")
    assert told(Api("root", Role.OPERATOR).get(f"/workflows/{first['id']}").json()) == told(first)


def test_asking_for_50_and_for_nothing_is_the_same_upload() -> None:
    """As before there were rules: an upload that a release interrupted is resumed."""

    def send(**form: Any) -> intake.Submission:
        return intake.submit(
            form=WorkflowForm(rater=RATER, **form),
            body=Body(chunks=[builders.ndjson([builders.row()])]),
            owner="alice",
            idempotency_key="k",
            close=True,
        )

    first = send()

    assert send(priority=50).workflow == first.workflow
    assert send(priority=50).replayed


# When it is changed


def test_a_change_is_clipped_by_the_rights_of_who_changes() -> None:
    rule(name="operators", trigger="", min_role=Role.OPERATOR, default_score=70, ceiling=100)
    rule(name="everybody", trigger="")
    path = f"/workflows/{submitted(Api(), priority=10)['id']}"

    own = Api().patch(path, {"priority": 90}).json()
    raised = Api("root", Role.OPERATOR).patch(path, {"priority": 90}).json()
    renamed = Api().patch(path, {"name": "n", "deadline_s": 60_000}).json()

    assert told(own) == (
        60,
        90,
        "priority 90 asked, 60 given: rule 'everybody' has a ceiling of 60",
    )
    assert told(raised)[:2] == (90, 90)
    assert told(renamed) == told(raised)


def test_a_rule_for_an_owner_holds_when_an_operator_changes_the_workflow(operator: Api) -> None:
    rule(trigger="", owner="alice")
    path = f"/workflows/{submitted(Api('alice'))['id']}"

    assert operator.patch(path, {"priority": 90}).json()["priority"] == 60


def test_a_new_rule_leaves_workflows_that_exist_alone(operator: Api) -> None:
    path = f"/workflows/{submitted(Api(), priority=90)['id']}"

    assert operator.post("/priority-rules", {**TUNING, "trigger": None}).status_code == 201

    assert operator.get(path).json()["priority"] == 90


def test_a_new_priority_takes_the_next_free_slot() -> None:
    """Two low backlogs; one is made urgent while the only slots are taken."""
    rule(name="everybody", trigger="", ceiling=80)
    executor = boot(slots=2)
    first = queued([f"first {n}" for n in range(6)], batch_size=1, priority=10)
    second = queued([f"second {n}" for n in range(6)], batch_size=1, priority=10)
    dispatcher = queue(Replica(window=2))
    dispatcher.run()
    running = [taken for message in dispatcher.take_sent() for taken in take(message, by=executor)]
    assert dispatcher.run().sent == 0
    other = second if running[0].workflow_id == first.pk else first
    bell.listen(timeout_s=0.01)

    control.change(workflow_id=other.pk, changes=control.Changes(priority=100), now=database_now())
    dispatch.observe(dispatcher.memory, bell.listen(timeout_s=5), database_now())
    assert dispatcher.memory.sight.rung
    leases.finish([rated(running[0])])
    dispatcher.run()

    (message,) = dispatcher.take_sent()
    (taken,) = take(message, by=executor)
    assert (taken.workflow_id, taken.priority) == (other.pk, 80)
    assert PriorityClass.HIGH in (dispatcher.memory.sight.versions[0].order or {})


# The API


def test_an_operator_adds_shows_changes_and_deletes_a_rule(
    operator: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="fulfillment.priority_rules"):
        made = operator.post("/priority-rules", TUNING)
        same = operator.post("/priority-rules", TUNING)
        path = f"/priority-rules/{made.json()['id']}"
        changed = operator.patch(path, {"ceiling": 70, "owner": "bot", "rater": RATER})
        shown = Api("v", Role.VIEWER).get(path)
        opened = operator.patch(path, {"owner": None, "rater": None, "trigger": None})
        listed = Api("v", Role.VIEWER).get("/priority-rules").json()
        deleted = operator.delete(path)

    expected = {
        **TUNING,
        "id": made.json()["id"],
        "position": 10,
        "enabled": True,
        "purpose": None,
        "min_role": "viewer",
        "owner": None,
        "rater": None,
        "max_checkpoint_age_s": None,
    }
    assert (made.status_code, made.json()) == (201, expected)
    assert (same.status_code, same.json()) == (200, expected)
    assert made["Location"] == f"/api/v1{path}"
    expected |= {"ceiling": 70, "owner": "bot", "rater": RATER}
    assert changed.json() == shown.json() == expected
    expected |= {"owner": None, "rater": None, "trigger": None}
    assert opened.json() == expected
    assert listed == {"items": [expected], "next": None}
    assert (deleted.status_code, operator.get(path).status_code) == (204, 404)
    key = expected["id"].removeprefix("rule_")
    assert [m for m in caplog.messages if m.startswith("priority_rule")] == [
        f"priority_rule_{act} id={key} name='automatic tuning' by=root"
        for act in ("created", "changed", "changed", "deleted")
    ]


def test_rules_are_listed_in_the_order_in_which_they_are_asked(operator: Api) -> None:
    for name, position in (("b", 5), ("c", None), ("a", 1)):
        body = {**TUNING, "name": name, **({} if position is None else {"position": position})}
        assert operator.post("/priority-rules", body).status_code == 201

    items = operator.get("/priority-rules").json()["items"]

    assert [(item["name"], item["position"]) for item in items] == [("a", 1), ("b", 5), ("c", 15)]


@pytest.mark.parametrize("role", [Role.VIEWER, Role.SUBMITTER])
def test_only_operators_change_rules(role: Role) -> None:
    path = f"/priority-rules/rule_{rule().pk}"
    api = Api("bob", role)

    answers = [api.post("/priority-rules", TUNING), api.patch(path, {}), api.delete(path)]

    assert [a.status_code for a in answers] == [403] * 3
    assert PriorityRule.objects.count() == 1


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"default_score": 61}, "default_score", "above_ceiling"),
        ({"ceiling": 101}, "ceiling", "out_of_range"),
        ({"default_score": -1}, "default_score", "out_of_range"),
        ({"ceiling": None}, "ceiling", "missing_field"),
        ({"name": ""}, "name", "empty_field"),
        ({"name": "held"}, "name", "taken"),
        ({"position": 10}, "position", "taken"),
        ({"position": "first"}, "position", "bad_type"),
        ({"trigger": "robot"}, "trigger", "bad_choice"),
        ({"purpose": "fun"}, "purpose", "bad_choice"),
        ({"min_role": None}, "min_role", "missing_field"),
        ({"rater": "nobody"}, "rater", "unknown_rater"),
        ({"max_checkpoint_age_s": 0}, "max_checkpoint_age_s", "out_of_range"),
        ({"floor": 1}, "floor", "unknown_field"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_at_its_field(
    operator: Api, changes: dict[str, Any], field: str, code: str
) -> None:
    rule(name="held", ceiling=99)

    posted = operator.post("/priority-rules", {**TUNING, **changes})
    other = f"/priority-rules/rule_{rule(name='other').pk}"
    patched = operator.patch(other, changes)

    for answer in (posted, patched):
        assert answer.status_code == 422, answer.content
        (problem,) = answer.json()["errors"]
        assert (problem["field"], problem["code"]) == (field, code)
        assert answer.json()["code"] == code


@pytest.mark.parametrize("rule_id", ["rule_1", "rule_x", "1", "rule_99999999999999999999"])
def test_an_unknown_rule_is_not_found(operator: Api, rule_id: str) -> None:
    path = f"/priority-rules/{rule_id}"

    answers = [operator.get(path), operator.patch(path, {"ceiling": 1}), operator.delete(path)]

    assert [a.status_code for a in answers] == [404] * 3


def test_the_database_refuses_what_the_forms_do() -> None:
    valid = {**TUNING, "position": 1}
    for wrong in (
        {"name": ""},
        {"trigger": "robot"},
        {"purpose": "fun"},
        {"min_role": "root"},
        {"ceiling": 39},
        {"ceiling": 101},
        {"max_checkpoint_age_s": 0},
    ):
        with pytest.raises(IntegrityError), transaction.atomic():
            PriorityRule.objects.create(**{**valid, **wrong})
    PriorityRule.objects.create(**valid)
    with pytest.raises(IntegrityError), transaction.atomic():
        PriorityRule.objects.create(**{**valid, "name": "another"})


def test_the_preview_says_who_would_get_what() -> None:
    rule(min_role=Role.SUBMITTER)
    rule(name="new", trigger="", purpose="launch", max_checkpoint_age_s=60, rater_id=RATER,
         default_score=80, ceiling=90)  # fmt: skip
    rule(name="off", trigger="", enabled=False)
    api = Api("v", Role.VIEWER)

    plain = api.get("/priority-rules/preview").json()["items"]
    asked = api.get(f"/priority-rules/preview?priority=95&rater={RATER}").json()["items"]
    old = api.get(f"/priority-rules/preview?rater={RATER}&checkpoint_age_s=61").json()["items"]

    assert len(plain) == 2 * 3 * 3
    assert {i["role"] for i in plain} == {"submitter", "operator", "admin"}
    assert {(i["trigger"], i["priority"], i["rule"]) for i in plain} == {
        ("automatic", 40, "automatic tuning"), ("human", 50, None),
    }  # fmt: skip
    (launch,) = [i for i in asked if (i["trigger"], i["purpose"], i["role"]) == (
        "human", "launch", "admin",
    )]  # fmt: skip
    assert launch == {
        "trigger": "human",
        "purpose": "launch",
        "role": "admin",
        "priority": 90,
        "ceiling": 90,
        "rule": "new",
        "reason": "priority 95 asked, 90 given: rule 'new' has a ceiling of 90",
    }
    assert {i["rule"] for i in old} == {"automatic tuning", None}
    assert api.get("/priority-rules/preview?rater=nobody").status_code == 404
    assert api.get("/priority-rules/preview?priority=101").status_code == 422


# The admin


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "position": 10,
        "enabled": "on",
        "min_role": "viewer",
        **TUNING,
        **changes,
    }


def test_a_rule_is_made_changed_and_deleted_in_the_admin(
    admin: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="fulfillment.priority_rules"):
        admin.post(f"{LIST}add/", fields())
        made = PriorityRule.objects.get()
        admin.post(f"{LIST}{made.pk}/change/", fields(ceiling=70))
        changed = PriorityRule.objects.get()
        admin.post(LIST, {"action": "delete_selected", "_selected_action": made.pk, "post": "yes"})

    assert (made.ceiling, changed.ceiling, PriorityRule.objects.count()) == (60, 70, 0)
    assert [m.split()[0] for m in caplog.messages] == [
        "priority_rule_created", "priority_rule_changed", "priority_rule_deleted",
    ]  # fmt: skip
    assert all(m.endswith("by=root") for m in caplog.messages)
    assert LogEntry.objects.count() == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"default_score": 61}, "Must not be above ceiling 60."),
        ({"position": 20}, "20 is that of rule &#x27;held&#x27;; take another."),
        ({"name": "held"}, "Is that of another rule."),
        ({"max_checkpoint_age_s": 0}, "greater than or equal to 1"),
        ({"ceiling": 101}, "less than or equal to 100"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_at_its_field_in_the_admin(
    admin: Client, changes: dict[str, Any], message: str
) -> None:
    rule(name="held", position=20)

    page = admin.post(f"{LIST}add/", fields(**changes)).content.decode()

    assert message in page
    assert PriorityRule.objects.count() == 1


def test_a_new_rule_is_offered_the_position_behind_all_others(admin: Client) -> None:
    rule(position=25)

    assert 'value="35"' in admin.get(f"{LIST}add/").content.decode()


def test_below_the_list_stands_who_would_get_what(admin: Client) -> None:
    rule()

    listed = admin.get(LIST).content.decode()
    asked = admin.get(f"{LIST}preview/?priority=90&owner=ann&rater={RATER}").content.decode()
    wrong = admin.get(f"{LIST}preview/?priority=900").content.decode()

    assert "no priority asked, 40 given: the default of rule &#x27;automatic tuning&#x27;" in listed
    assert "priority 90 asked, 60 given" in asked
    assert "priority 90 asked, 90 given: no rule applies" in asked
    assert "less than or equal to 100" in wrong
    assert "given" not in wrong


def test_the_preview_is_for_who_may_see_the_rules() -> None:
    user = User.objects.create(username="eve", is_staff=True)
    client = Client()
    client.force_login(user)

    refused = client.get(f"{LIST}preview/").status_code
    user.user_permissions.add(Permission.objects.get(codename="view_priorityrule"))

    assert (refused, client.get(f"{LIST}preview/").status_code) == (403, 200)


def test_a_workflow_says_in_the_admin_why_its_priority_is_what_it_is(admin: Client) -> None:
    rule(trigger="")
    submitted(Api(), priority=90)

    page = admin.get(f"/admin/fulfillment/workflow/{Workflow.objects.get().pk}/change/")

    assert "priority 90 asked, 60 given" in page.content.decode()
