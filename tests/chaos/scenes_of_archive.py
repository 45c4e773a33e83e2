"""What is done to the archive beside its use: a purge of a url, and shadow refresh.

Each scene begins with empty tables: a purge walks through all requests there are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from django.test import override_settings

from fulfillment import documents, leases, purging, shadow
from fulfillment.clock import database_now
from fulfillment.models import (
    BatchPayload,
    Purge,
    Rating,
    RatingRequest,
    ShadowSample,
    ShadowScore,
    Workflow,
)
from fulfillment.policy.lifecycle import RequestState, WorkflowState
from tests.builders import RATER
from tests.chaos.scenes import BATCH, Ground, Scene, names, nothing_changes
from tests.chaos.world import CALL, SECRET_URL, World, documents_of, path

HITS = 5


@contextmanager
def _refreshing() -> Iterator[None]:
    """Let every hit be drawn, and computed again where nothing else is to be done."""
    with override_settings(AIRS_SHADOW_REFRESH=1.0):
        yield


def _known_everywhere(world: World, tag: str) -> Ground:
    """A url in the archive, in what has ended, in batches of each state, and in a sample."""
    world.forget()
    secret, plain = names(tag, 10, "secret"), names(tag, 5)
    rows = [*secret[:3], secret[0], *plain[:2]]
    rated = world.submit(rows, batch_size=2)
    world.settle()
    with _refreshing():
        hit = world.submit(rows)
    delayed = world.submit([*names(tag, 1, "flaky"), secret[3]], batch_size=2)
    world.dispatch()
    world.deliver()
    for started in ([secret[4], plain[2]], secret[5:7], secret[9:]):
        last = world.submit(started, batch_size=2)
        world.dispatch()
    _start_and_stand_still(world)
    assert world.act(last, "cancel").status_code == 200
    on_its_way = world.submit([secret[7], plain[3]], batch_size=2)
    world.dispatch()
    waiting = world.submit([secret[7], plain[3]], batch_size=2)
    world.dispatch()
    ready = world.submit([secret[8], plain[4]], batch_size=2)
    return Ground(tag=tag, workflows=[rated, hit, delayed, on_its_way, waiting, ready])


def _start_and_stand_still(world: World) -> None:
    """Have the model answer all that is out, and stop before any of it is written."""
    pairs = [pair for message in world.messages for pair in message]
    world.messages.clear()
    taken = leases.take_over(
        pairs, boot_id=world.executor.boot_id, task_id=world.executor.boot_id, call_limit=CALL
    )
    assert len(taken) == 3
    taken.sort(key=lambda batch: batch.batch_id)
    world.executor.said = [world.executor.rated(batch) for batch in taken]


def _order(world: World) -> int:
    answer = world.operator.post("/archive/purge", {"url": SECRET_URL, "dry_run": False})
    return int(answer.status_code)


def _purge(world: World, ground: Ground) -> None:
    _order(world)
    purging.run_once(database_now())


def _purge_on(world: World, ground: Ground) -> None:
    """One who stood still says what the model said; an order that was not recorded is given again.

    The control worker goes on with one that was.
    """
    first, second, of_nobody = world.executor.said
    leases.finish([first, of_nobody])
    if not Purge.objects.exists():
        assert _order(world) in {200, 202}
    while Purge.objects.filter(finished_at=None).exists():
        purging.run_once(database_now())
    nothing_changes(world, lambda: leases.finish([first, second, of_nobody]))


def _forgotten(world: World, ground: Ground) -> None:
    """Nothing of the text is left; counts, states and scores are, and neighbours were rated."""
    assert "secret" not in _text_of_everything(world)
    assert not Rating.objects.filter(url_digest__isnull=False).exists()
    (purge,) = Purge.objects.all()
    secret = RatingRequest.objects.filter(url_digest__isnull=False)
    failed = secret.filter(state=RequestState.FAILED, error="purged")
    assert (purge.requests, purge.failed) == (secret.count(), failed.count())
    done = secret.filter(state=RequestState.COMPLETED, score__isnull=False)
    assert secret.filter(state=RequestState.CANCELLED).count() == 1
    assert done.count() + failed.count() + 1 == secret.count()
    first, hit, *open_ones = (Workflow.objects.get(pk=w.pk) for w in ground.workflows)
    assert {first.state, hit.state} == {WorkflowState.COMPLETED}
    assert {workflow.state for workflow in open_ones} == {WorkflowState.PARTIAL}
    plain = RatingRequest.objects.filter(url_digest=None)
    assert set(plain.values_list("state", flat=True)) == {RequestState.COMPLETED}
    assert not plain.filter(extra=None).exists()
    assert not plain.filter(output=None).exists()
    # Three had been rated before; two were by who stood still, if nobody had taken his lease.
    assert 3 <= purge.ratings <= 5
    assert ShadowSample.objects.count() == 2


def _text_of_everything(world: World) -> str:
    rows = [
        world.look(f"SELECT t::text FROM fulfillment_{table} t")
        for table in ("ratingrequest", "rating", "purge", "event")
    ]
    payloads = [documents.unpack(bytes(p.data)) for p in BatchPayload.objects.all()]
    samples = [documents.unpack(bytes(s.data)) for s in ShadowSample.objects.all()]
    return f"{rows} {payloads} {samples}"


def _archived(world: World, tag: str) -> Ground:
    """Rows that the archive has, and some that it has not."""
    world.forget()
    old = names(tag, HITS)
    world.submit(old)
    world.settle()
    rows = [*old, old[0], *names(tag, 6, "new"), old[1]]
    return Ground(tag=tag, rows=rows, key=f"key-{tag}")


def _draw(world: World, ground: Ground) -> None:
    with _refreshing():
        _upload(world, ground)


def _upload(world: World, ground: Ground) -> int:
    answer = world.api.upload(
        path("/workflows", rater=RATER, batch_size=BATCH),
        documents_of(ground.rows),
        Idempotency_Key=ground.key,
    )
    if answer.status_code == 202:
        ground.workflows = [Workflow.objects.get(public_id=answer.json()["id"])]
    return int(answer.status_code)


def _draw_again(world: World, ground: Ground) -> None:
    with _refreshing():
        assert _upload(world, ground) == 202


def _drawn_once(world: World, ground: Ground) -> None:
    """Each hit is one sample with the score that it was answered with; what was no hit is none."""
    samples = {s.fingerprint: s.score for s in ShadowSample.objects.all()}
    ratings = Rating.objects.exclude(workflow_id=ground.workflow.pk)
    assert samples == dict(ratings.values_list("fingerprint", "score"))
    assert len(samples) == HITS
    assert ShadowSample.objects.count() == HITS
    ground.workflow.refresh_from_db()
    assert ground.workflow.state == WorkflowState.COMPLETED


def _drawn(world: World, tag: str) -> Ground:
    ground = _archived(world, tag)
    _draw(world, ground)
    world.settle()
    return ground


def _refresh(world: World, ground: Ground) -> None:
    with _refreshing():
        shadow.run_once(database_now())


def _refresh_on(world: World, ground: Ground) -> None:
    """What died half-way is removed, what was made ends; the next runs make and record."""
    world.silence_uploads()
    world.janitor()
    for _ in range(2):
        world.settle()
        _refresh(world, ground)
    assert ShadowScore.objects.exists()


def _recorded_once(world: World, ground: Ground) -> None:
    """Each sample gave one pair of scores; the client's workflow is what it was (I13)."""
    assert not ShadowSample.objects.exists()
    scores = ShadowScore.objects.values_list("old_score", "new_score")
    assert len(scores) == HITS
    assert all(old == new for old, new in scores)
    made = Workflow.objects.filter(owner=shadow.OWNER)
    assert {workflow.state for workflow in made} == {WorkflowState.COMPLETED}
    assert 1 <= len(made) <= 2
    _has_ended(ground)


def _has_ended(ground: Ground) -> None:
    rows = RatingRequest.objects.filter(workflow=ground.workflow)
    assert set(rows.values_list("state", flat=True)) == {RequestState.COMPLETED}
    assert rows.count() == len(ground.rows)


def _refreshed(world: World, tag: str) -> Ground:
    ground = _drawn(world, tag)
    _refresh(world, ground)
    world.settle()
    return ground


ARCHIVE_SCENES = [
    # The item beside a secret one, whose lease the purge took, is computed again.
    Scene(name="purge", arrange=_known_everywhere, act=_purge, go_on=_purge_on, check=_forgotten,
          again=1),
    Scene(name="draw", arrange=_archived, act=_draw, go_on=_draw_again, check=_drawn_once),
    # Killed before the samples know of their workflow they are used again: twice at most.
    Scene(name="refresh", arrange=_drawn, act=_refresh, go_on=_refresh_on, check=_recorded_once,
          again=2 * HITS),
    Scene(name="record", arrange=_refreshed, act=_refresh, go_on=_refresh, check=_recorded_once),
]  # fmt: skip
