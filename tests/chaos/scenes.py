"""What can be interrupted: each scene arranges a workflow, acts, and says how its client goes on.

The act is what dies. `go_on` is what the client does afterwards: send it again, or nothing.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from fulfillment import leases, retention
from fulfillment.clock import database_now
from fulfillment.leases import Finish
from fulfillment.models import Batch, ExecutorBoot, RatingRequest, Upload, Workflow
from fulfillment.policy.lifecycle import BatchState, RequestState, WorkflowState
from tests.builders import RATER
from tests.chaos.fail_points import FailPoints, watched
from tests.chaos.world import World, documents_of, path
from tests.rating_queue import Replica

CHUNK = 8
BATCH = 3


@dataclass(kw_only=True)
class Ground:
    """What a scene has arranged."""

    tag: str
    rows: list[str] = field(default_factory=list)
    workflows: list[Workflow] = field(default_factory=list)
    key: str = ""

    @property
    def workflow(self) -> Workflow:
        return self.workflows[0]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One act that may die anywhere."""

    name: str
    arrange: Callable[[World, str], Ground]
    act: Callable[[World, Ground], None]
    go_on: Callable[[World, Ground], None] = lambda _world, _ground: None
    check: Callable[[World, Ground], None] = lambda _world, _ground: None
    dies_in_executor: bool = False
    """Whether predictions under way may be lost with the act, and be made again."""
    again: int = 0
    """Predictions beyond the first that it may cost on purpose."""


def names(tag: str, count: int, kind: str = "ok") -> list[str]:
    """Return names of rows that no other ground has."""
    return [f"{kind}-{tag}-{number}" for number in range(count)]


def mixed(tag: str) -> list[str]:
    """Return rows of three chunks: equal ones, ones the archive has, a bad and a flaky one."""
    plain = names(tag, 14)
    return [
        *OLD, *plain[:9], plain[0], *names(tag, 1, "bad"), plain[5],
        *names(tag, 1, "flaky"), *plain[9:], plain[0],
    ]  # fmt: skip


OLD = names("archived", 3)


def _archived(world: World) -> None:
    """Let the archive have the old rows; the first ground of a test fills it."""
    if not world.model.predictions[OLD[0]]:
        world.submit(OLD)
        world.settle()


def _upload(world: World, ground: Ground) -> None:
    world.api.upload(
        path("/workflows", rater=RATER, batch_size=BATCH),
        documents_of(ground.rows),
        Idempotency_Key=ground.key,
    )


def _new_upload(world: World, tag: str) -> Ground:
    _archived(world)
    return Ground(tag=tag, rows=mixed(tag), key=f"key-{tag}")


def _upload_again(world: World, ground: Ground) -> None:
    answer = world.api.upload(
        path("/workflows", rater=RATER, batch_size=BATCH),
        documents_of(ground.rows),
        Idempotency_Key=ground.key,
    )
    assert answer.status_code == 202, answer.content
    assert answer.json()["accepted"] == len(ground.rows)
    ground.workflows = [Workflow.objects.get(public_id=answer.json()["id"])]


def _uploaded_once(world: World, ground: Ground) -> None:
    assert Upload.objects.filter(key=ground.key).count() == 1
    _has_rows(ground.workflow, ground.rows)
    assert Workflow.objects.get(pk=ground.workflow.pk).state == WorkflowState.PARTIAL


def _has_rows(workflow: Workflow, rows: Sequence[str]) -> None:
    """Assert that each row is there once and ended as its name says."""
    found = {r.request_id: r for r in RatingRequest.objects.filter(workflow=workflow)}
    assert set(found) == {f"r{number}" for number in range(len(rows))}
    for number, name in enumerate(rows):
        state = RequestState(found[f"r{number}"].state)
        expected = RequestState.FAILED if name.startswith("bad") else RequestState.COMPLETED
        assert state == expected, (name, state)


def _gone(world: World, ground: Ground) -> None:
    world.janitor()


def _whole_or_nothing(world: World, ground: Ground) -> None:
    uploads = list(Upload.objects.filter(key=ground.key))
    if uploads:
        _has_rows(uploads[0].workflow, ground.rows)
        return
    assert not Workflow.objects.filter(state=WorkflowState.RECEIVING).exists()
    for table in ("ratingrequest", "batch", "batchpayload", "workflowstats", "statsdelta"):
        left = world.look(
            f"SELECT count(*) FROM fulfillment_{table} t WHERE NOT EXISTS"
            " (SELECT FROM fulfillment_workflow w WHERE w.id = t.workflow_id)"
        )
        assert left == [(0,)], table


def _open_workflow(world: World, tag: str) -> Ground:
    _archived(world)
    workflow = world.submit(names(tag, 2, "first"), close="false", batch_size=BATCH)
    return Ground(tag=tag, rows=mixed(tag), key=f"key-{tag}", workflows=[workflow])


def _append(world: World, ground: Ground) -> None:
    world.api.upload(
        f"/workflows/{ground.workflow.public_id}/requests",
        documents_of(ground.rows, start=2),
        Idempotency_Key=ground.key,
    )


def _append_again_and_close(world: World, ground: Ground) -> None:
    answer = world.api.upload(
        f"/workflows/{ground.workflow.public_id}/requests",
        documents_of(ground.rows, start=2),
        Idempotency_Key=ground.key,
    )
    assert answer.status_code in {200, 202}, answer.content
    assert answer.json()["accepted"] == len(ground.rows)
    _close(world, ground)


def _close(world: World, ground: Ground) -> None:
    answer = world.act(ground.workflow, "close")
    assert answer.status_code == 200, answer.content


def _appended_once(world: World, ground: Ground) -> None:
    _has_rows(ground.workflow, [*names(ground.tag, 2, "first"), *ground.rows])


def _close_after_silence(world: World, ground: Ground) -> None:
    world.silence_uploads()
    _close(world, ground)


def _whole_chunks(world: World, ground: Ground) -> None:
    rows = RatingRequest.objects.filter(workflow=ground.workflow).count() - 2
    assert rows == len(ground.rows) or rows % CHUNK == 0, rows


def _two_that_share(world: World, tag: str) -> Ground:
    """Two workflows of the same rows, one older with a batch in flight; the archive has some."""
    rows = mixed(tag)
    first = world.submit(rows, batch_size=BATCH)
    world.dispatcher.fleet.live[0] = Replica(window=2)
    world.dispatch()
    world.dispatcher.fleet.live[0] = Replica(window=64)
    _archived_by_hand(world, names(tag, 1, "late"))
    second = world.submit([*rows, *names(tag, 1, "late")], batch_size=BATCH)
    return Ground(tag=tag, rows=rows, workflows=[first, second])


def _archived_by_hand(world: World, rows: Sequence[str]) -> None:
    """Submit rows that another workflow rates while they wait."""
    world.submit(rows, priority=90)


def _both_complete(world: World, ground: Ground) -> None:
    for workflow in ground.workflows:
        workflow.refresh_from_db()
        assert workflow.state == WorkflowState.PARTIAL
    _has_rows(ground.workflow, ground.rows)


def _dispatch(world: World, ground: Ground) -> None:
    world.dispatch()


def _sent(world: World, tag: str) -> Ground:
    ground = _two_that_share(world, tag)
    world.dispatch()
    return ground


def _deliver(world: World, ground: Ground) -> None:
    world.deliver()


def _zombie_comes_back(world: World, ground: Ground) -> None:
    """The dead executor says its finishes while another one holds the batches."""
    world.expire_leases()
    world.dispatch()
    pairs = [pair for message in world.messages for pair in message]
    task = world.executor.boot_id
    leases.take_over(
        pairs, boot_id=world.executor.boot_id, task_id=task, call_limit=timedelta(minutes=1)
    )
    nothing_changes(world, lambda: leases.finish(_one_each(world.executor.said)))
    world.messages = []
    world.executor.rate(pairs, task_id=task)


def _said_again(world: World, ground: Ground) -> None:
    _both_complete(world, ground)
    nothing_changes(world, lambda: world.executor.rate([p for m in world.delivered for p in m]))
    nothing_changes(world, lambda: leases.finish(_one_each(world.executor.said)))


def _one_each(said: Sequence[Finish]) -> list[Finish]:
    return list({finish.taken.batch_id: finish for finish in said}.values())


def nothing_changes(world: World, act: Callable[[], object]) -> None:
    def written() -> list[object]:
        return [
            world.look(f"SELECT t.*, t.xmin FROM fulfillment_{table} t ORDER BY 1")
            for table in ("batch", "ratingrequest", "rating", "event", "flight", "statsdelta")
        ]

    before = written()
    act()
    assert written() == before


def _delayed_that_wait(world: World, tag: str) -> Ground:
    """A batch in back-off whose other items wait for a flight that ends."""
    shared = names(tag, 2)
    first = world.submit(shared, batch_size=BATCH)
    world.dispatch()
    second = world.submit([*names(tag, 1, "flaky"), *shared], batch_size=BATCH)
    held, world.messages = world.messages, []
    world.dispatch()
    world.deliver()
    assert Batch.objects.get(workflow=second).state == BatchState.DELAYED
    world.messages = held
    world.deliver()
    return Ground(tag=tag, rows=shared, workflows=[first, second])


def _all_complete(world: World, ground: Ground) -> None:
    for workflow in ground.workflows:
        workflow.refresh_from_db()
        assert workflow.state == WorkflowState.COMPLETED, workflow.state


def _lost_three_times(world: World, tag: str) -> Ground:
    """Batches of dead executors: one not started, one started, one that died on a named item."""
    workflow = world.submit(names(tag, 3 * BATCH), batch_size=BATCH)
    world.dispatch()
    ids = [pair for message in world.messages for pair in message]
    world.messages = []
    taken = leases.take_over(
        ids[1:], boot_id=world.executor.boot_id, task_id=world.executor.boot_id,
        call_limit=timedelta(minutes=1),
    )  # fmt: skip
    culprit = max(taken, key=lambda t: t.batch_id)
    assert leases.extend(
        culprit.batch_id, culprit.fence, call_limit=timedelta(minutes=1), probing=0
    )
    return Ground(tag=tag, workflows=[workflow])


def _expire(world: World, ground: Ground) -> None:
    leases.expire(now=database_now() + timedelta(hours=1), trust_heartbeats=False)


def _one_culprit(world: World, ground: Ground) -> None:
    states = [r.state for r in RatingRequest.objects.filter(workflow=ground.workflow)]
    found = Counter(states)
    assert found == {RequestState.COMPLETED: 8, RequestState.FAILED: 1}


def _queue_of_all_states(world: World, tag: str, **parameters: object) -> Workflow:
    """A workflow with batches READY, LEASED (on its way, and started), WAITING, DELAYED, DONE."""
    other = names(tag, 2, "shared")
    world.submit(other, priority=99)
    rows = [
        *names(tag, 2), *names(tag, 1, "bad"), *names(tag, 2, "flaky"), *other,
        *names(tag, 9, "more"),
    ]  # fmt: skip
    workflow = world.submit(rows, batch_size=2, **parameters)
    world.dispatcher.fleet.live[0] = Replica(window=4)
    world.dispatch()
    world.messages, held = world.messages[:1], world.messages[1:]  # the shared ones stay out
    world.messages, shared = held, world.messages
    world.deliver()
    world.dispatcher.fleet.live[0] = Replica(window=3)
    world.dispatch()
    ids = [pair for message in world.messages for pair in message]
    leases.take_over(
        ids[:1], boot_id=world.executor.boot_id, task_id=world.executor.boot_id,
        call_limit=timedelta(minutes=1),
    )  # fmt: skip
    world.messages += shared
    world.dispatcher.fleet.live[0] = Replica(window=64)
    return workflow


def busy(world: World, tag: str) -> Ground:
    return Ground(tag=tag, workflows=[_queue_of_all_states(world, tag)])


def _all_due(world: World, tag: str) -> Ground:
    """Workflows past their deadline, past their end, counting as finished, and complete."""
    late = _queue_of_all_states(world, f"{tag}d")
    hasty = world.submit(names(f"{tag}h", 8), batch_size=2, complete_when=0.25)
    world.messages, kept = [], world.messages
    world.dispatcher.fleet.live[0] = Replica(window=64)
    ended = world.submit(names(f"{tag}e", 4), batch_size=2)
    done = world.submit(names(f"{tag}o", 4), batch_size=2)
    for workflow in (hasty, done):
        _rate_some(world, workflow, 2)
    world.messages += kept
    now = database_now()
    Workflow.objects.filter(pk=late.pk).update(deadline_at=now)
    Workflow.objects.filter(pk=ended.pk).update(ends_at=now)
    return Ground(tag=tag, workflows=[late, hasty, ended, done])


def _rate_some(world: World, workflow: Workflow, most: int) -> None:
    """Rate the first batches of a workflow, without telling the checker."""
    world.dispatch()
    own = set(Batch.objects.filter(workflow=workflow).values_list("pk", flat=True))
    pairs = [pair for message in world.messages for pair in message]
    mine = [pair for pair in pairs if pair[0] in own][:most]
    world.messages = [[pair] for pair in pairs if pair not in mine]
    executor = world.executor
    taken = leases.take_over(
        mine, boot_id=executor.boot_id, task_id=executor.boot_id, call_limit=timedelta(minutes=1)
    )
    leases.finish([executor.rated(t) for t in taken])


def _check(world: World, ground: Ground) -> None:
    world.check()


def _ended_as_due(world: World, ground: Ground) -> None:
    late, hasty, ended, done = (Workflow.objects.get(pk=w.pk) for w in ground.workflows)
    assert late.state == WorkflowState.PARTIAL
    # Where the checker died, their last rows may have been rated before it came again.
    assert hasty.state in {WorkflowState.PARTIAL, WorkflowState.COMPLETED}
    assert ended.state in {WorkflowState.FAILED, WorkflowState.COMPLETED}
    assert done.state == WorkflowState.COMPLETED


def _to_be_closed(world: World, tag: str) -> Ground:
    workflow = world.submit(names(tag, 2), close="false")
    world.dispatch()
    world.deliver()
    return Ground(tag=tag, workflows=[workflow])


def _close_quietly(world: World, ground: Ground) -> None:
    world.act(ground.workflow, "close")


def _remains(world: World, tag: str) -> Ground:
    """What the janitor has to do: a dead upload, payloads a day old, silent boots."""
    done = world.submit(names(tag, 4), batch_size=2)
    world.settle()
    Workflow.objects.filter(pk=done.pk).update(finished_at=database_now() - timedelta(days=2))
    ground = Ground(tag=tag, rows=mixed(tag), key=f"key-{tag}", workflows=[done])
    half_way(world, ground)
    ExecutorBoot.objects.exclude(pk=world.executor.boot_id).update(
        heartbeat_at=database_now() - timedelta(days=3)
    )
    return ground


def half_way(world: World, ground: Ground) -> None:
    """Let an upload die after its first chunk."""

    def second_chunk(points: FailPoints) -> None:
        if points.at is None and sum("COPY" in name for name in points.passed) > 3:
            points.at = len(points.passed)

    points = FailPoints()
    points.at_each = lambda: second_chunk(points)
    with watched(points):
        _upload(world, ground)
    assert points.dead
    world.silence_uploads()
    Workflow.objects.filter(state=WorkflowState.RECEIVING).update(
        created_at=database_now() - timedelta(seconds=90)
    )


def _erase(world: World, ground: Ground) -> None:
    retention.run_once(database_now())


def _erase_again(world: World, ground: Ground) -> None:
    retention.run_once(database_now())


def _erased(world: World, ground: Ground) -> None:
    _whole_or_nothing(world, ground)
    assert not Batch.objects.filter(workflow=ground.workflow).exists()
    assert RatingRequest.objects.filter(workflow=ground.workflow, state=1).count() == 4


def _work_of_all(world: World, tag: str) -> Ground:
    return Ground(tag=tag, rows=mixed(tag), key=f"key-{tag}")


def _live(world: World, ground: Ground) -> None:
    """All that happens to a workflow, from its upload to its event."""
    _upload(world, ground)
    for _ in range(3):
        world.dispatch()
        world.deliver()
    world.check()


SCENES = [
    Scene(
        name="upload", arrange=_new_upload, act=_upload, go_on=_upload_again, check=_uploaded_once
    ),
    Scene(
        name="upload, client gone", arrange=_new_upload, act=_upload, go_on=_gone,
        check=_whole_or_nothing,
    ),
    Scene(
        name="append", arrange=_open_workflow, act=_append, go_on=_append_again_and_close,
        check=_appended_once,
    ),
    Scene(
        name="append, client gone", arrange=_open_workflow, act=_append,
        go_on=_close_after_silence, check=_whole_chunks,
    ),
    Scene(name="dispatch", arrange=_two_that_share, act=_dispatch, check=_both_complete),
    Scene(
        name="rate", arrange=_sent, act=_deliver, go_on=_zombie_comes_back, check=_said_again,
        dies_in_executor=True,
    ),
    Scene(name="look again", arrange=_delayed_that_wait, act=_dispatch, check=_all_complete),
    Scene(name="expire", arrange=_lost_three_times, act=_expire, check=_one_culprit),
    Scene(name="check", arrange=_all_due, act=_check, check=_ended_as_due),
    Scene(
        name="close", arrange=_to_be_closed, act=_close_quietly, go_on=_close,
        check=_all_complete,
    ),
    Scene(
        name="erase", arrange=_remains, act=_erase, go_on=_erase_again, check=_erased
    ),
    Scene(
        name="life", arrange=_work_of_all, act=_live, go_on=_upload_again, check=_uploaded_once,
        dies_in_executor=True,
    ),
]  # fmt: skip
