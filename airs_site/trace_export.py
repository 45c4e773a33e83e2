"""A trace for the simulator from this system's own history, and the parameters beside it.

An evaluation is a workflow; its ratings are listed by number, the same number for the same
fingerprint. What the archive already had before the span stands in a row before second 0. History
cannot tell: when the rows of a workflow came (all count at its creation), which requests a retry
added, what single workflows cost (all cost what their model takes on average), and priorities
beyond high and low (middle counts as high, best effort as low).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count
from typing import Any, Final

from airs_site.simulation.workload import Evaluation
from airs_site.trace_params import Measured, described, served
from fulfillment import request_history, service_history, shadow
from fulfillment.models import Trigger
from fulfillment.policy.freshness import Look
from fulfillment.policy.priority import PriorityClass, priority_class
from fulfillment.request_history import AskedRating, AskedWorkflow
from models_admin import utilisation

MOST_REQUESTS: Final = 2_000_000
"""In a trace whose sample nobody chose: what a simulation runs in a minute."""
_INTERNAL: Final = (shadow.OWNER,)
_DAY: Final = timedelta(days=1)
_SAMPLES: Final = (1, 2, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Days of the clock (UTC), the last one up to now."""

    start: datetime
    """Midnight."""
    until: datetime
    days: int


@dataclass(kw_only=True, slots=True)
class Export:
    """A trace and its parameters."""

    evaluations: list[Evaluation] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What had to be assumed."""


def span_of(now: datetime, days: int) -> Span:
    """Return the days up to now, today included."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return Span(start=midnight - (days - 1) * _DAY, until=now, days=days)


def export(
    span: Span,
    *,
    sample: int | None = None,
    batch_s: float | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Export:
    """Return the trace of a span: of one in `sample` requests, by default as many as are handy.

    `batch_s` is what a full batch takes where nothing was measured.
    """
    workflows = list(request_history.asked(span.start, span.until, without=_INTERNAL))
    if not workflows:
        return Export()
    requests = sum(workflow.requests for workflow in workflows)
    one_in = sample or next(n for n in _handy() if requests <= n * MOST_REQUESTS)
    models = service_history.models()
    names = _names(workflows, models)
    numbering = _Numbering()
    made = Export()
    for workflow in sorted(workflows, key=lambda workflow: (workflow.created_at, workflow.id)):
        number = len(made.evaluations) + 1
        ids = numbering.runs(request_history.ratings(workflow, one_in=one_in))
        if ids:
            made.evaluations.append(_evaluation(workflow, number, ids, span, names))
        progress(number / len(workflows))
    if made.evaluations and numbering.stored:
        made.evaluations.insert(0, _stored(made.evaluations[0], numbering.stored))
    measured = Measured(
        start=span.start,
        days=span.days,
        sample=one_in,
        workflows={
            name: [workflow for workflow in workflows if names[workflow.rater_id] == name]
            for name in sorted(set(names.values()))
        },
        models={names[rater]: models[rater] for rater in names},
        served=served(),
        use=utilisation.hours(span.start, span.until),
    )
    made.params, made.notes = described(measured, batch_s=batch_s)
    return made


class _Numbering:
    """Numbers ratings in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._next = count()
        self.stored: list[tuple[int, int]] = []
        """Runs of those that the archive had before."""

    def runs(self, asked: Iterable[AskedRating]) -> list[tuple[int, int]]:
        """Return the numbers of what a workflow asks for, as runs."""
        found: list[tuple[int, int]] = []
        for rating in asked:
            number = self._numbers.get(rating.rating)
            if number is None:
                number = self._numbers[rating.rating] = next(self._next)
                if request_history.was_hit(rating):
                    _append(self.stored, number)
            elif rating.look == Look.STALE:
                # What the archive had was too old: it is rated anew, for all that come after.
                number = self._numbers[rating.rating] = next(self._next)
            elif rating.look == Look.BYPASSED:
                number = next(self._next)
            _append(found, number)
        return found


def _append(runs: list[tuple[int, int]], number: int) -> None:
    if runs and sum(runs[-1]) == number:
        runs[-1] = runs[-1][0], runs[-1][1] + 1
    else:
        runs.append((number, 1))


def _evaluation(
    workflow: AskedWorkflow,
    number: int,
    ids: Sequence[tuple[int, int]],
    span: Span,
    names: Mapping[str, str],
) -> Evaluation:
    cls = priority_class(workflow.priority, best_effort=workflow.best_effort)
    requests = sum(length for _, length in ids)
    return Evaluation(
        id=number,
        at_s=round((workflow.created_at - span.start).total_seconds(), 1),
        rater=names[workflow.rater_id],
        owner=workflow.owner,
        low=cls in {PriorityClass.LOW, PriorityClass.BEST_EFFORT},
        deadline_s=max(1.0, round(workflow.allowed_s, 1)),
        query_set=0,
        set_size=requests,
        mode="listed",
        offset=0,
        queries=requests,
        results=1,
        experiment=number,
        delta=0.0,
        permanent=round(workflow.failed / workflow.computed, 5) if workflow.computed else 0.0,
        cost=1.0,
        automatic=workflow.trigger == Trigger.AUTOMATIC,
        ids=tuple(ids),
    )


def _stored(like: Evaluation, runs: Sequence[tuple[int, int]]) -> Evaluation:
    """Return the row that fills the archive with what it had before the span."""
    return Evaluation(
        id=0,
        at_s=-1.0,
        rater=like.rater,
        owner="",
        low=False,
        deadline_s=1.0,
        query_set=0,
        set_size=1,
        mode="listed",
        offset=0,
        queries=1,
        results=1,
        experiment=0,
        delta=0.0,
        permanent=0.0,
        cost=1.0,
        automatic=True,
        ids=tuple(runs),
    )


def _names(workflows: Sequence[AskedWorkflow], models: Mapping[str, str]) -> dict[str, str]:
    """Return what each rater is called in the trace: raters of one model share its replicas."""
    raters: dict[str, set[str]] = defaultdict(set)
    for workflow in workflows:
        raters[models[workflow.rater_id]].add(workflow.rater_id)
    return {
        rater: rater if len(sharing) == 1 else model
        for model, sharing in raters.items()
        for rater in sharing
    }


def _handy() -> Iterator[int]:
    return (digit * 10**power for power in count() for digit in _SAMPLES)
