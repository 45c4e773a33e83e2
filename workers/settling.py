"""From what became of a batch to what is written: what ends, what is tried again and when.

Tries are an item's own: one that waited for another batch, or was not asked because the server
refused, has used none.
"""

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from fulfillment import bell
from fulfillment.leases import Finish
from fulfillment.policy.priority import priority_class
from fulfillment.policy.traffic import decide_retry
from fulfillment.scores import Scored
from workers.work import SHORTEST_CALL_S, EndpointData, Trouble, Work, kept_json

KEPT = timedelta(seconds=30)
"""When the items of a rater that was paused may be looked at again."""


def finish_of(work: Work, *, now: datetime | None) -> Finish:
    """Return the finish of a batch; `now` is needed where it has troubles."""
    taken = work.taken
    finish = Finish(
        taken=taken,
        scored=_aged(work),
        failed=work.failed,
        for_good=frozenset(work.for_good),
        said=work.said,
        calls=work.calls,
        accelerator_seconds=work.seconds,
        device_seconds=work.device_s,
    )
    if not work.troubles:
        return finish
    assert now is not None
    costly = {item for item, trouble in work.troubles.items() if trouble.costs_attempt}
    tries = [taken.tries_of(i) + (i in costly) for i in range(len(taken.fingerprints))]
    finish.cost_attempt = bool(costly)
    if taken.tries is not None or 0 < len(costly) < len(tries):
        finish.tries = tries
    over = {item for item in costly if tries[item] >= taken.max_attempts}
    finish.failed = {**work.failed, **{item: work.troubles[item].code for item in over}}
    finish.said = {
        **work.said,
        **{i: kept_json({"detail": work.troubles[i].detail}) for i in over},
    }
    left = {item: t for item, t in work.troubles.items() if item not in over}
    if not left:
        return finish
    if any(trouble.pauses for trouble in left.values()):
        finish.not_before = now + KEPT
        return finish
    decision = decide_retry(
        now=now,
        attempt=max(tries[item] for item in left),
        max_attempts=taken.max_attempts,
        chance=random.random(),
        retry_after_s=max(t.retry_after_s or 0.0 for t in left.values()),
        deadline_at=taken.deadline_at,
        call_limit=timedelta(seconds=SHORTEST_CALL_S),
        costs_attempt=any(item in costly for item in left),
    )
    if decision.retry:
        finish.not_before = decision.not_before
    else:
        finish.timed_out = dict.fromkeys(left, decision.code)
    return finish


def part_of(work: Work) -> Finish | None:
    """Return what of a batch can be written while the rest is still being computed, if anything."""
    if not work.scored and not work.failed:
        return None
    return Finish(
        taken=work.taken,
        scored=_aged(work),
        failed=dict(work.failed),
        for_good=frozenset(work.for_good),
        said=dict(work.said),
    )


def written(work: Work, part: Finish) -> None:
    """Let the items of a part be done with."""
    for item in (*part.scored, *part.failed):
        work.written.add(item)
        work.scored.pop(item, None)
        work.failed.pop(item, None)
        work.said.pop(item, None)
        work.answered_at.pop(item, None)
        work.for_good.discard(item)


def pause_of(work: Work) -> Trouble | None:
    """Return why the batch's rater must pause, if it must."""
    return next((trouble for trouble in work.troubles.values() if trouble.pauses), None)


def serves(endpoint: EndpointData, model_version: str) -> bool:
    """Say whether an endpoint's answers are ratings of raters pinned to a version of its model.

    The dispatcher chooses among our own replicas by what it read a while ago; a replica that is
    found to be of another version now is asked nothing.
    """
    if endpoint.managed and "" in (endpoint.key_version, model_version):
        return True  # on either side, "" says that the version was not known
    return endpoint.key_version == model_version


def expected_version(endpoint: EndpointData, model_version: str) -> str:
    """Return what an answer must call itself for a batch that is pinned to a version.

    What an external server calls itself is compared when it is known what counts: then it is "".
    """
    return (endpoint.version or model_version) if endpoint.managed else ""


def distrust(work: Work, *, version: str, pauses: bool) -> None:
    """Throw away what an external model answered in a version other than its batch was sent for.

    Its rater pauses where that version does not count: now it is `version`.
    """
    trouble = Trouble(
        code="model_version_changed" if pauses else "wrong_version",
        detail=f"the model now calls itself {work.reported}; it was {version}" if pauses else "",
        costs_attempt=False,
        pauses=pauses,
    )
    # What it answered without a score is no verdict either.
    work.troubles |= dict.fromkeys(work.answered_at, trouble)
    work.scored = {}
    work.failed = {i: c for i, c in work.failed.items() if i not in work.answered_at}
    work.said = {i: s for i, s in work.said.items() if i not in work.answered_at}
    work.for_good -= work.answered_at.keys()


def ring(works: Sequence[Work]) -> None:
    """Wake the dispatcher and tell it what the calls met."""
    now = time.monotonic()
    met: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    refused_at: dict[tuple[str, int], float] = defaultdict(float)
    for work in works:
        cls = priority_class(work.taken.priority, best_effort=work.taken.best_effort)
        key = (work.taken.replica, int(cls))
        counts = met[key]
        counts[0] += work.succeeded
        counts[1] += work.overloaded
        counts[2] += work.away
        refused_at[key] = max(refused_at[key], work.refused_at)
    for (replica, cls_number), (succeeded, overloaded, away) in met.items():
        signal: dict[str, Any] = {}
        if overloaded:
            signal["refused_ago_s"] = round(now - refused_at[replica, cls_number], 3)
        bell.ring(
            replica=replica,
            cls=cls_number,
            succeeded=succeeded,
            overloaded=overloaded,
            away=away,
            **signal,
        )
    further: dict[str, int] = defaultdict(int)
    for work in works:
        if work.taken.max_qps is not None:
            further[work.taken.rater_id] += work.further
    for rater_id, calls in further.items():
        if calls:
            bell.ring(rater=rater_id, further=calls)


def _aged(work: Work) -> dict[int, Any]:
    now = time.monotonic()
    # Of each item of each batch: `_replace` takes twice as long.
    return {
        i: Scored(s.score, s.label, s.output, s.warnings, now - work.answered_at[i], s.url_digest)
        for i, s in work.scored.items()
    }
