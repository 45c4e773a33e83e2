"""What the work of a rater takes, learned from what was measured while it went on.

The unit is a replica-second: a replica that is never idle does one second of them a second. What is
measured are *call seconds*, from sending a call to its answer. A replica of our own holds a window
of sixteen batches and computes one after the other, so that most of a call is waiting in its queue.
How much of it is not waiting follows from the wall clock: n replicas did at most n seconds of work
a second. So of all call seconds of a period

    work = min(call seconds, replicas x length of the period)

and each rater that shares the replicas did its part of that, in the proportion of its call seconds.
With batches waiting all the time the replicas were never idle, and this is exact; the pace that
follows, replicas / seconds, is then the one that was seen, whatever a replica is. With a light load
calls do not wait and their own length is what counts. In between it is a bound from above. An
external model is as many replicas as it may hold calls: none of them waits on our side.
"""

from dataclasses import dataclass
from typing import Final

MEAN_WEIGHT: Final = 0.02
"""Of a batch in the moving averages: half of what they say comes from the last 34 batches."""
OWN_WEIGHT: Final = 10
"""Batches of a workflow after which its own mean says as much of it as its rater's."""
LEAST_S: Final = 1e-6
"""A request takes so long at least, so that nothing divides by zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What a rater did in a period: requests that ended by work, in calls of so many seconds."""

    requests: int
    call_seconds: float
    is_full: bool
    """Whether batches waited for its replicas all the time."""
    device_seconds: float = 0.0
    """Of accelerators, as servers told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a request takes on average."""

    seconds: float
    """Replica-seconds."""
    call_seconds: float
    requests: int
    """That it was learned from."""
    is_exact: bool
    """Whether any were measured while batches waited; if not, `seconds` is a bound from above."""
    device_seconds: float = 0.0
    """What is counted as accelerator-seconds of its workflow."""


def worked(*, servers: float, period_s: float, call_seconds: float) -> float:
    """Return the share of the call seconds of a model, of all its raters, that was work."""
    if call_seconds <= 0:
        return 1.0
    return min(1.0, servers * period_s / call_seconds)


def learn(before: Cost | None, span: Span, *, worked: float, batch_size: int) -> Cost | None:
    """Return the cost after a period; None while nothing was ever measured.

    A bound gives way to the first exact measure, and moves an exact one only where it is lower.
    """
    if span.requests <= 0:
        return before
    call_seconds = max(LEAST_S, span.call_seconds / span.requests)
    device_seconds = span.device_seconds / span.requests
    seconds = max(LEAST_S, worked * call_seconds)
    if before is None:
        return Cost(
            seconds=seconds,
            call_seconds=call_seconds,
            requests=span.requests,
            is_exact=span.is_full,
            device_seconds=device_seconds,
        )
    weight = 1 - (1 - MEAN_WEIGHT) ** (span.requests / batch_size)
    if span.is_full and not before.is_exact:
        mean = seconds
    elif span.is_full or seconds < before.seconds:
        mean = before.seconds + weight * (seconds - before.seconds)
    else:
        mean = before.seconds
    return Cost(
        seconds=mean,
        call_seconds=before.call_seconds + weight * (call_seconds - before.call_seconds),
        requests=before.requests + span.requests,
        is_exact=before.is_exact or span.is_full,
        # Of a rater that was measured before devices were, the first measure counts; a period of
        # which nobody told, such as one before that, is no measure.
        device_seconds=before.device_seconds + weight * (device_seconds - before.device_seconds)
        if before.device_seconds and device_seconds
        else device_seconds or before.device_seconds,
    )


def of_one(call_seconds: float, requests: int, *, mean: float, batch_size: int) -> float:
    """Return what a workflow's requests take in times of its rater's mean, by those it has had.

    Only where calls do not wait on our side: else a workflow of a lower class, whose calls wait
    longer, would seem to be harder work.
    """
    batches = max(0, requests) / batch_size
    seen_s = call_seconds + OWN_WEIGHT * mean * batch_size
    return seen_s / ((batches + OWN_WEIGHT) * mean * batch_size)


def paced(
    seconds: float, *, servers: float, calls_a_request: float, max_qps: float | None
) -> float:
    """Return the replica-seconds to plan a request with where only so many calls a second go out.

    The time that the replicas stand idle for that limit is the request's, too.
    """
    if max_qps is None:
        return seconds
    return max(seconds, servers * calls_a_request / max_qps)
