"""The limit: what a scheduler could do that knew all that comes and moved replicas for free.

Work is a fluid that the whole pool may compute at once, earliest deadline first, against an archive
that has every rating which was asked for before. What is still undone at its deadline is dropped:
as long as all work counts alike, no schedule gets more of it done in time. To have the most
evaluations *whole*, those are given up, one by one, whose work is the largest among those that
stand in the way of the first that misses its deadline.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from airs_site.simulation.trace import Workload
from airs_site.simulation.workload import DAY_S

_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Work of one evaluation, in replica-seconds."""

    at_s: float
    deadline_s: float
    work_s: float
    requests: float
    """That the work answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The most that could be had."""

    whole_in_time: float
    requests_in_time: float


def bound(workload: Workload, days: int | None = None) -> Bound:
    """Return the limit for the evaluations of the measured days."""
    tasks, requests = _tasks(workload, days)
    replicas = workload.params.replicas
    undone = fluid(tasks, replicas)
    lost = sum(
        task.requests * left / task.work_s
        for task, left in zip(tasks, undone, strict=True)
        if task.work_s
    )
    return Bound(
        whole_in_time=1 - len(given_up(tasks, replicas)) / len(tasks),
        requests_in_time=1 - lost / requests,
    )


def fluid(tasks: Sequence[Task], replicas: int) -> list[float]:
    """Serve tasks, in the order of their arrival, as a fluid; return what is undone of each."""
    left = [task.work_s for task in tasks]
    due: list[tuple[float, int]] = []
    now = 0.0
    for number, task in enumerate([*tasks, None]):
        until = task.at_s if task else inf
        while due and now < until:
            deadline_s, first = due[0]
            done_at = now + left[first] / replicas
            end = max(now, min(done_at, deadline_s, until))
            left[first] = max(0.0, left[first] - (end - now) * replicas)
            now = end
            if left[first] <= _NEGLIGIBLE or deadline_s <= now:
                heapq.heappop(due)
        now = max(now, until)
        if task:
            heapq.heappush(due, (task.deadline_s, number))
    return left


def given_up(tasks: Sequence[Task], replicas: int) -> set[int]:
    """Return which tasks to give up, so that all others end in time."""
    gone: set[int] = set()
    while True:
        kept = [number for number in range(len(tasks)) if number not in gone]
        left = fluid([tasks[number] for number in kept], replicas)
        missed = [n for n, undone in zip(kept, left, strict=True) if undone > _NEGLIGIBLE]
        if not missed:
            return gone
        first = min(missed, key=lambda n: (tasks[n].deadline_s, n))
        gone.add(_largest_in_the_way(tasks, kept, first, replicas))


def _largest_in_the_way(
    tasks: Sequence[Task], kept: Sequence[int], missed: int, replicas: int
) -> int:
    """Return the largest of the tasks due by then and served since the pool was last idle."""
    deadline_s = tasks[missed].deadline_s
    due = [n for n in kept if tasks[n].deadline_s <= deadline_s and tasks[n].at_s < deadline_s]
    busy_since = idle_at = -inf
    for n in due:
        if tasks[n].at_s > idle_at:
            busy_since = idle_at = tasks[n].at_s
        idle_at += tasks[n].work_s / replicas
    return max((n for n in due if tasks[n].at_s >= busy_since), key=lambda n: (tasks[n].work_s, n))


def _tasks(workload: Workload, days: int | None) -> tuple[list[Task], int]:
    """Return the work there is, and how many requests there are, hits included."""
    params = workload.params
    horizon_s = min(days or params.days, params.days) * DAY_S
    cost = {rater.id: rater.cost_mult for rater in params.raters}
    rating_s = workload.scale * params.batch_service_s / params.batch
    stored = np.zeros(workload.distinct, dtype=bool)
    stored[workload.stored] = True
    tasks: list[Task] = []
    requests = 0
    for place, evaluation in enumerate(workload.evaluations):
        ids = workload.requests(place)
        if 0 <= evaluation.at_s < horizon_s:
            missing = ids[~stored[ids]]
            tasks.append(
                Task(
                    at_s=evaluation.at_s,
                    deadline_s=evaluation.at_s + evaluation.deadline_s,
                    work_s=len(missing) * rating_s * cost[evaluation.rater] * evaluation.cost,
                    requests=len(missing),
                )
            )
            requests += len(ids)
        stored[ids] = True
    return tasks, requests
