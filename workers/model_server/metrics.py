"""What `/metrics` shows, in Prometheus' text format. All labels are bounded and start at 0."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from workers.model_server.meter import Meter, Waits

Outcome = Literal[
    "ok",
    "invalid",
    "too_large",
    "overloaded",
    "expired",
    "warming_up",
    "draining",
    "device_failed",
    "abandoned",
]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self, meter: Meter, *, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Account(meter, clock))
        self.calls = Counter(
            "airs_model_calls_total",
            "Inference calls by how they ended",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in get_args(Outcome):
            self.calls.labels(outcome)
        self.ready = self._gauge("airs_model_ready", "1 when calls are served")
        self.queue_rows = self._gauge("airs_model_queue_rows", "Rows accepted and not yet answered")
        self.duty_cycle = self._gauge(
            "airs_duty_cycle_ratio", "Share of the last minute in which the device computed"
        )
        self.duty_cycle.set_function(lambda: meter.duty_cycle(clock()))
        self.batch_rows = self._histogram(
            "airs_model_batch_rows",
            "Sequences in a device batch",
            (1, 2, 4, 8, 16, 32, 64, 256, 1024),
        )
        self.call_seconds = self._histogram(
            "airs_model_call_seconds",
            "Answered calls, from the whole body's arrival to the answer",
            (0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60),
        )
        self.info = Gauge(
            "airs_model_info", "What is served", ["model", "version"], registry=self.registry
        )

    def batch(self, sequences: int) -> None:
        """Take note of a batch that starts."""
        self.batch_rows.observe(sequences)

    def text(self) -> bytes:
        """The whole page."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)


class Account(Collector):
    """The meter's totals, read when asked for."""

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        self._meter = meter
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        """One counter for each total, and the histogram of waits."""
        meter, now = self._meter, self._clock()
        yield counter(
            "airs_model_busy_seconds",
            "Seconds in which the device computed",
            meter.busy_seconds(now),
        )
        yield counter(
            "airs_model_lane_seconds",
            "Seconds in which lanes computed, summed over the lanes",
            meter.lane_seconds(now),
        )
        yield counter("airs_model_rows", "Predictions answered", meter.predictions)
        yield counter("airs_model_sequences", "Sequences encoded", meter.sequences)
        yield counter("airs_model_batches", "Device batches", meter.batches)
        yield counter(
            "airs_model_full_rows", "Sequences that the batches could have had", meter.full_rows
        )
        yield counter("airs_model_real_tokens", "Tokens of the sequences", meter.real_tokens)
        yield counter(
            "airs_model_padded_tokens",
            "Tokens computed for them, padding included",
            meter.padded_tokens,
        )
        yield waits("airs_model_queue_wait_seconds", meter.waits)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """A counter without labels; `_total` is added to its name."""
    return CounterMetricFamily(name, text, value=value)


def waits(name: str, found: Waits) -> HistogramMetricFamily:
    """The histogram of queue waits."""
    family = HistogramMetricFamily(name, "How long sequences waited for the device")
    bounds = [*map(str, found.BOUNDS_S), "+Inf"]
    family.add_metric(
        [],
        buckets=list(zip(bounds, map(float, accumulate(found.counts)), strict=True)),
        sum_value=found.total_s,
    )
    return family
