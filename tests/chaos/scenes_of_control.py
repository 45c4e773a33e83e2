"""Acts of a client upon its workflow, and the news of its end, each of which may die anywhere."""

from collections.abc import Callable

from fulfillment import deliveries, notify, raters
from fulfillment.clock import database_now
from fulfillment.models import Delivery, DeliveryAttempt, Event, RatingRequest, Workflow
from fulfillment.policy.delivery import DeliveryState
from fulfillment.policy.lifecycle import RequestState, WorkflowState
from tests.builders import RATER
from tests.chaos.scenes import Ground, Scene, busy, names
from tests.chaos.world import World, documents_of


def _acting(what: str) -> Scene:
    """Return the scene of an act that its client repeats until it is answered."""

    def act(world: World, ground: Ground) -> None:
        world.act(ground.workflow, what)

    def again(world: World, ground: Ground) -> None:
        answer = world.act(ground.workflow, what)
        assert answer.status_code == 200, answer.content

    return Scene(name=what, arrange=busy, act=act, go_on=again, check=ENDS[what])


def _is(*states: WorkflowState) -> Callable[[World, Ground], None]:
    def check(world: World, ground: Ground) -> None:
        ground.workflow.refresh_from_db()
        assert ground.workflow.state in states, ground.workflow.state

    return check


ENDS = {
    "cancel": _is(WorkflowState.CANCELLED),
    "complete": _is(WorkflowState.PARTIAL),
}


def _pause(world: World, ground: Ground) -> None:
    world.act(ground.workflow, "pause")


def _pause_and_resume(world: World, ground: Ground) -> None:
    assert world.act(ground.workflow, "pause").status_code == 200
    world.dispatch()
    world.deliver()
    assert world.act(ground.workflow, "resume").status_code == 200


def _resume(world: World, ground: Ground) -> None:
    world.act(ground.workflow, "resume")


def _paused(world: World, tag: str) -> Ground:
    ground = busy(world, tag)
    assert world.act(ground.workflow, "pause").status_code == 200
    return ground


def _resume_again(world: World, ground: Ground) -> None:
    assert world.act(ground.workflow, "resume").status_code == 200


def _hurry(world: World, ground: Ground) -> None:
    world.api.patch(
        f"/workflows/{ground.workflow.public_id}", {"priority": 90, "deadline_s": 3_600}
    )


def _hurry_again(world: World, ground: Ground) -> None:
    answer = world.api.patch(
        f"/workflows/{ground.workflow.public_id}", {"priority": 90, "deadline_s": 3_600}
    )
    assert answer.status_code == 200, answer.content
    assert answer.json()["priority"] == 90


def _ended_with_open_ends(world: World, tag: str) -> Ground:
    """A CANCELLED workflow: some of it rated, a batch of it still with an executor."""
    ground = busy(world, tag)
    assert world.act(ground.workflow, "cancel").status_code == 200
    world.check()
    return ground


def _retry(world: World, ground: Ground) -> None:
    world.api.post(
        f"/workflows/{ground.workflow.public_id}/retry", Idempotency_Key=f"again-{ground.tag}"
    )


def _retry_again(world: World, ground: Ground) -> None:
    answer = world.api.post(
        f"/workflows/{ground.workflow.public_id}/retry", Idempotency_Key=f"again-{ground.tag}"
    )
    assert answer.status_code in {200, 202}, answer.content


def _retried_once(world: World, ground: Ground) -> None:
    ground.workflow.refresh_from_db()
    assert (ground.workflow.round, ground.workflow.state) == (2, WorkflowState.PARTIAL)
    assert Event.objects.filter(workflow=ground.workflow).count() == 2
    failed = RatingRequest.objects.filter(workflow=ground.workflow).exclude(
        state=RequestState.COMPLETED
    )
    assert [request.state for request in failed] == [RequestState.FAILED]


def _with_webhook(world: World, tag: str) -> Ground:
    answer = world.api.post(
        "/workflows",
        {
            "rater": RATER,
            "name": tag,
            "requests": documents_of(names(tag, 3)),
            "webhook": {"url": world.receiver},
        },
    )
    assert answer.status_code == 202, answer.content
    workflow = Workflow.objects.get(public_id=answer.json()["id"])
    for _ in range(2):
        world.dispatch()
        world.deliver()
    return Ground(tag=tag, workflows=[workflow])


def _publish(world: World, ground: Ground) -> None:
    notify.run_once(database_now())


def _send(world: World, ground: Ground) -> None:
    deliveries.run_once(database_now())


def _published(world: World, tag: str) -> Ground:
    ground = _with_webhook(world, tag)
    notify.run_once(database_now())
    return ground


def _news_arrive(world: World, ground: Ground) -> None:
    """The next runs of beat: what a dead sender held goes out again when its lease has ended."""
    notify.run_once(database_now())
    Delivery.objects.filter(state=DeliveryState.PENDING).update(
        lease_until=None, due_at=database_now()
    )
    deliveries.run_once(database_now())


def _told(world: World, ground: Ground) -> None:
    """One delivery, taken; heard at least once, always with the event's id and the same bytes."""
    (event,) = Event.objects.filter(workflow=ground.workflow)
    (delivery,) = Delivery.objects.filter(event=event)
    assert delivery.state == DeliveryState.DELIVERED
    heard = [seen for seen in world.heard if seen.headers["webhook-id"] == event.public_id]
    assert 1 <= len(heard) <= 2
    assert {seen.body for seen in heard} == {bytes(delivery.body)}


def _arrived(world: World, tag: str) -> Ground:
    """What was delivered, and where to have it delivered again."""
    ground = _published(world, tag)
    _news_arrive(world, ground)
    _told(world, ground)
    delivery = Delivery.objects.select_related("endpoint").get(event__workflow=ground.workflow)
    ground.key = (
        f"/webhook-endpoints/{delivery.endpoint.public_id}/deliveries/{delivery.public_id}/replay"
    )
    return ground


def _replay(world: World, ground: Ground) -> None:
    world.api.post(ground.key)
    deliveries.run_once(database_now())


def _replay_again(world: World, ground: Ground) -> None:
    answer = world.api.post(ground.key)
    assert answer.status_code == 202, answer.content
    _news_arrive(world, ground)


def _told_again(world: World, ground: Ground) -> None:
    """Still one delivery, taken: the same id and bytes each time, each attempt in its log."""
    (event,) = Event.objects.filter(workflow=ground.workflow)
    (delivery,) = Delivery.objects.filter(event=event)
    assert (delivery.state, delivery.lease_until) == (DeliveryState.DELIVERED, None)
    heard = [seen for seen in world.heard if seen.headers["webhook-id"] == event.public_id]
    assert 2 <= len(heard) <= 3
    assert {seen.body for seen in heard} == {bytes(delivery.body)}
    log = DeliveryAttempt.objects.filter(delivery=delivery).order_by("number")
    numbers = list(log.values_list("number", flat=True))
    assert numbers == list(range(1, delivery.attempts + 1))
    assert 2 <= delivery.attempts <= len(heard)


def _two_versions(world: World, tag: str) -> Ground:
    """Work of an old rater version in all states, and a workflow of the current one."""
    ground = busy(world, tag)
    raters.change(rater_id=RATER, changes={"config": {"changed_for": tag}}, now=database_now())
    ground.workflows.append(world.submit(names(f"{tag}n", 4), batch_size=2))
    return ground


def _retire(world: World, ground: Ground) -> None:
    number = ground.workflow.rater_version.number
    world.operator.post(f"/raters/{RATER}/versions/{number}/retire")


def _retire_again(world: World, ground: Ground) -> None:
    number = ground.workflow.rater_version.number
    answer = world.operator.post(f"/raters/{RATER}/versions/{number}/retire")
    assert answer.status_code == 200, answer.content
    assert answer.json()["retired_at"] is not None


def _retired(world: World, ground: Ground) -> None:
    """What had not been started ended, with a code; started tries and the new version went on."""
    old, new = (Workflow.objects.get(pk=w.pk) for w in ground.workflows)
    assert (old.state, new.state) == (WorkflowState.PARTIAL, WorkflowState.COMPLETED)
    ended = RatingRequest.objects.filter(workflow=old)
    assert ended.filter(state=RequestState.COMPLETED).exists()
    errors = ended.exclude(state=RequestState.COMPLETED).values_list("error", flat=True)
    assert set(errors) == {"invalid_request", "version_retired"}
    refused = world.act(old, "retry")
    assert (refused.status_code, refused.json()["code"]) == (409, "version_retired")


CONTROL_SCENES = [
    *map(_acting, ENDS),
    Scene(name="pause", arrange=busy, act=_pause, go_on=_pause_and_resume,
          check=_is(WorkflowState.PARTIAL)),
    Scene(name="resume", arrange=_paused, act=_resume, go_on=_resume_again,
          check=_is(WorkflowState.PARTIAL)),
    Scene(name="change", arrange=busy, act=_hurry, go_on=_hurry_again,
          check=_is(WorkflowState.PARTIAL)),
    Scene(name="retry", arrange=_ended_with_open_ends, act=_retry, go_on=_retry_again,
          check=_retried_once),
    Scene(name="publish", arrange=_with_webhook, act=_publish, go_on=_news_arrive, check=_told),
    Scene(name="send", arrange=_published, act=_send, go_on=_news_arrive, check=_told),
    Scene(name="replay", arrange=_arrived, act=_replay, go_on=_replay_again, check=_told_again),
    Scene(name="retire", arrange=_two_versions, act=_retire, go_on=_retire_again, check=_retired),
]  # fmt: skip
