"""What scheduling promises, on a real stack: four slots, three owners, four classes, two raters.

Everything is as in life but the model, whose servers (`paced_server`) have one slot each and take
a quarter of a second a call. Four scenes, one after the other:

1. *Alone*: small workflows of high priority on an idle stack.
2. *Backlog*: equal backlogs of three owners, of middle priority, and some low and best-effort work
   below, while workflows of high priority come.
3. *Calm*: two owners submit small workflows that need half of the slots.
4. *Flood*: the same, while the third owner submits some hundred workflows at once.

Last comes the service's own report of the run.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, product

import numpy as np

from fulfillment.policy.ordering import DEFAULT_SHARES
from fulfillment.policy.priority import PriorityClass
from tests.acceptance.stack import until
from tests.benchmarks import live_calls, report
from tests.benchmarks.costs import Meter
from tests.benchmarks.live_calls import Span
from tests.benchmarks.live_stack import (
    BATCH,
    FILLER,
    OWNERS,
    RATERS,
    REPLICAS,
    SERVICE_S,
    Run,
    live_stack,
)
from tests.benchmarks.report import Figure, median, number, spread

SLOTS = REPLICAS * len(RATERS)
REPLICAS_S = SERVICE_S / REPLICAS
"""From dispatch to dispatch of a rater whose windows are full."""
FLOODER = OWNERS[-1]
HIGH_BATCHES, OTHERS_BATCHES, FLOOD_BATCHES = 4, 8, 4
OTHERS_EVERY_S = 4.0
FLOOD_DEADLINE_S = 60
"""Less than the flood would take alone: one that can be done in time is no flood."""
SETTLE_S = 2.0
REPORT = "live_service_report.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How long the scenes are."""

    alone: int
    backlog: int
    """Batches of an owner at a rater in middle priority; each class below has three quarters as
    many of all owners together."""
    high_every_s: float
    calm_s: float
    flood_s: float
    flood: int
    """Workflows."""


FULL = Sizes(alone=8, backlog=140, high_every_s=2.5, calm_s=28.0, flood_s=40.0, flood=400)
QUICK = Sizes(alone=4, backlog=60, high_every_s=2.0, calm_s=12.0, flood_s=16.0, flood=120)


def live(*, quick: bool) -> Iterator[Figure]:
    """Run all scenes; yield their figures and print the service's report."""
    sizes = QUICK if quick else FULL
    with live_stack() as run:
        meter = Meter(run.stack.home)
        _alone(run, sizes)
        yield from _backlog(run, sizes)
        calm_from_s = _small_workflows(run, "calm", sizes.calm_s)
        yield from _flood(run, sizes, calm_from_s)
        yield _attempts(run, meter)
        print(run.report(report.directory() / REPORT), flush=True)


def _alone(run: Run, sizes: Sizes) -> None:
    for rater in RATERS:
        run.wait([run.submit("warm", OWNERS[0], rater, "high", BATCH)])
    for n in range(sizes.alone):
        rater = RATERS[n % len(RATERS)]
        run.wait([run.submit("alone", OWNERS[n % 3], rater, "high", HIGH_BATCHES * BATCH)])


def _backlog(run: Run, sizes: Sizes) -> Iterator[Figure]:
    below = sizes.backlog // 4
    # Whoever comes to empty windows fills them, which would be no equal share.
    for rater in RATERS:
        run.submit("fill", FILLER, rater, "middle", (REPLICAS * run.window + 8) * BATCH)
    for rater, owner in product(RATERS, OWNERS):
        run.submit("backlog", owner, rater, "middle", sizes.backlog * BATCH)
        run.submit("backlog", owner, rater, "low", below * BATCH)
        run.submit("backlog", owner, rater, "best_effort", below * BATCH)
    time.sleep(SETTLE_S)
    from_s = time.time()
    raters, owners = cycle(RATERS), cycle(OWNERS)
    while run.ready() > run.window * REPLICAS:
        run.submit("high", next(owners), next(raters), "high", HIGH_BATCHES * BATCH)
        time.sleep(sizes.high_every_s)
    run.wait(run.ids("fill", "backlog", "high"))
    calls = run.calls("fill", "backlog", "high")
    waiting = [call for call in calls if live_calls.group_of(call) == "backlog"]
    span = live_calls.backlog(waiting, from_s=from_s, held_s=run.held_s)
    yield _duty(run, span)
    yield _high(run)
    yield from _classes(run, from_s)
    yield _owners(run, from_s)


def _duty(run: Run, span: Span) -> Figure:
    calls = run.calls("fill", "backlog", "high")
    duty = span.busy_s(calls) / (SLOTS * span.seconds)
    by_model = [
        span.busy_s([call for call in calls if call.model.endswith(rater)])
        / (REPLICAS * span.seconds)
        for rater in RATERS
    ]
    return Figure(
        name="live_duty_with_backlog",
        value=duty,
        unit="of slot-seconds",
        ratio_to="all slots busy all the time; goal 0.95",
        ratio=duty,
        n=len(span.calls(calls)),
        note=f"{SLOTS} slots of {SERVICE_S:g} s a call, as their servers measured it, in"
        f" {span.seconds:.0f} s in which both raters had batches READY; by rater"
        f" {spread(by_model)}",
    )


def _high(run: Run) -> Figure:
    alone, beside = run.took_s(run.ids("alone")), run.took_s(run.ids("high"))
    delay_s = median(beside) - median(alone)
    behind_s = SERVICE_S * (run.window + HIGH_BATCHES / REPLICAS)
    return Figure(
        name="live_high_delay_s",
        value=delay_s,
        unit="s",
        ratio_to="the call that is running when it comes (0.25 s)",
        ratio=SERVICE_S / max(delay_s, 0.001),
        n=len(beside),
        note=f"workflows of {HIGH_BATCHES} batches of high priority: {median(beside):.2f} s"
        f" ({spread(beside)}) beside a full backlog, {median(alone):.2f} s ({spread(alone)}) alone;"
        f" behind all that the windows held it would be {behind_s:.1f} s",
    )


def _classes(run: Run, from_s: float) -> Iterator[Figure]:
    """Look at the classes below while the one above them had batches READY."""
    above = [call for call in run.calls("backlog") if live_calls.class_of(call) == "middle"]
    span = live_calls.backlog(above, from_s=from_s, held_s=run.held_s)
    calls = span.calls(run.calls("fill", "backlog", "high"))
    counts = live_calls.by_class(calls)
    for cls in (PriorityClass.LOW, PriorityClass.BEST_EFFORT):
        name, floor = cls.name.lower(), DEFAULT_SHARES[cls]
        gap_s = live_calls.longest_gap_s(calls, name, span)
        yield Figure(
            name=f"live_{name}_share",
            value=counts[name] / len(calls),
            unit="of calls",
            ratio_to=f"its floor, {floor:.2g} of the dispatches",
            ratio=counts[name] / len(calls) / floor,
            n=len(calls),
            note=f"in {span.seconds:.0f} s in which middle priority had batches READY at both"
            f" raters; longest time without a call of it at one of them {gap_s:.1f} s, with what"
            f" the windows hold about {run.held_s + REPLICAS_S / floor:.1f} s are due; calls: "
            + ", ".join(f"{cls} {count}" for cls, count in counts.most_common()),
        )


def _owners(run: Run, from_s: float) -> Figure:
    calls = run.calls("backlog")
    middle = [call for call in calls if live_calls.class_of(call) == "middle"]
    span = live_calls.all_wait(middle, from_s=from_s, held_s=run.held_s)
    assert span.seconds > 0, "an owner's backlog was too short"
    seconds = live_calls.by_owner_s(span.calls(calls))
    shares = [seconds.get(owner, 0.0) / sum(seconds.values()) for owner in OWNERS]
    off = live_calls.off_equal(shares)
    return Figure(
        name="live_owner_share_off",
        value=off,
        unit="of an equal share",
        ratio_to="the goal, a tenth of an equal share",
        ratio=0.1 / max(off, 0.001),
        n=len(span.calls(calls)),
        note=f"slot-seconds of {len(OWNERS)} owners with equal backlogs in {span.seconds:.0f} s in"
        f" which all of them had batches READY at both raters: "
        + ", ".join(f"{owner} {share:.3f}" for owner, share in zip(OWNERS, shares, strict=True)),
    )


def _small_workflows(run: Run, group: str, seconds: float) -> float:
    """Let all owners but the flooder submit small workflows for so long; return since when."""
    from_s = time.time()
    for n in range(round(seconds / OTHERS_EVERY_S)):
        time.sleep(max(0.0, from_s + n * OTHERS_EVERY_S - time.time()))
        for owner in OWNERS:
            for rater in RATERS:
                if owner != FLOODER:
                    run.submit(group, owner, rater, "middle", OTHERS_BATCHES * BATCH)
    run.wait(run.ids(group, without=FLOODER))
    return from_s


def _flood(run: Run, sizes: Sizes, calm_from_s: float) -> Iterator[Figure]:
    def submit(n: int) -> str:
        rater = RATERS[n % len(RATERS)]
        return run.submit(
            "flood", FLOODER, rater, "middle", FLOOD_BATCHES * BATCH, deadline_s=FLOOD_DEADLINE_S
        )

    with ThreadPoolExecutor(4) as pool:
        flood_s = time.time()
        flooding = [pool.submit(submit, n) for n in range(sizes.flood)]
        until(lambda: run.ready() > run.window * REPLICAS, timeout_s=30, what="the flood is there")
        from_s = _small_workflows(run, "flood", sizes.flood_s)
        flood_took_s = max(0.0, from_s - flood_s)
        flood = [future.result() for future in flooding]
    left = run.ready()
    told = _told(run, flood)
    calm, beside = (run.took_s(run.ids(g, without=FLOODER)) for g in ("calm", "flood"))
    p75_calm, p75_beside = (float(np.quantile(took, 0.75)) for took in (calm, beside))
    yield Figure(
        name="live_flood_others_p75_s",
        value=p75_beside,
        unit="s",
        ratio_to="the same without the flood",
        ratio=p75_calm / p75_beside,
        n=len(beside),
        note=f"workflows of {OTHERS_BATCHES} batches of two owners that need half of the slots,"
        f" while a third submits {sizes.flood} of {FLOOD_BATCHES}: {spread(beside)} s beside it,"
        f" {spread(calm)} s (p75 {p75_calm:.2f}) before; the flood began {flood_took_s:.1f} s"
        f" earlier and had {left} batches READY at the end. Its owner is told: {told}",
    )
    others = [c for c in run.calls("calm", "flood") if live_calls.owner_of(c) != FLOODER]
    served = Span(from_s=from_s, until_s=from_s + sizes.calm_s).busy_s(others)
    before = Span(from_s=calm_from_s, until_s=calm_from_s + sizes.calm_s).busy_s(others)
    yield Figure(
        name="live_flood_others_share",
        value=served / (SLOTS * sizes.calm_s),
        unit="of slot-seconds",
        ratio_to="the same without the flood",
        ratio=served / before,
        n=len(others),
        note=f"what the two owners got in {sizes.calm_s:.0f} s; they asked for half",
    )
    for workflow_id in flood:
        run.clients[FLOODER].post(f"/api/v1/workflows/{workflow_id}/cancel")
    run.wait(flood)


def _told(run: Run, flood: list[str]) -> str:
    """Return what the flooding owner sees as the reason why the rest of it waits."""
    for workflow_id in reversed(flood):
        document = run.clients[FLOODER].get(f"/api/v1/workflows/{workflow_id}").json()
        if document["finished_at"] is None and (standing := document.get("standing")):
            return f"“{standing}”"
    return "nothing"


def _attempts(run: Run, meter: Meter) -> Figure:
    """Count claims: each raises a batch's fence, as does each finish."""
    ((fences, tries, calls, requests),) = run.stack.query(
        """
        SELECT sum(b.fences)::bigint, sum(s.attempts)::bigint, sum(s.model_calls)::bigint,
               sum(s.from_model)::bigint
        FROM fulfillment_workflow w JOIN fulfillment_workflowstats s ON s.workflow_id = w.id
        CROSS JOIN LATERAL (SELECT sum(fence) AS fences FROM fulfillment_batch
                            WHERE workflow_id = w.id) AS b
        WHERE w.finished_at IS NOT NULL AND w.state = 5
        """
    )
    cost = meter.read()
    claims = fences - tries
    return Figure(
        name="live_attempts_a_model_call",
        value=claims / calls,
        unit="claims",
        ratio_to="one; goal 1.05 at most",
        ratio=calls / claims,
        n=calls,
        note=f"of all workflows that were COMPLETED; {requests / calls:.2f} requests a call"
        f" (batches of {BATCH}), {tries / calls:.3f} tries a call; foreign load"
        f" {number(cost.foreign_cores)} cores",
    )
