"""`/metrics` of the web server: what hosting does, in Prometheus' text format.

All of it is read from PostgreSQL when it is asked for, so that each web process says the same. It
takes a token, as it names models and pools. More of a single replica stands in the `/metrics` of
its own server.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import Final

from django.db.models import Sum
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from rest_framework.request import Request
from rest_framework.views import APIView

from fulfillment.authentication import IsViewer
from models_admin import utilisation
from models_admin.clock import database_now
from models_admin.models import AcceleratorPool, ModelConfig, ModelKind, ModelServer
from models_admin.policy.replicas import ServerState

_DUTY: Final = timedelta(minutes=5)
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsView(APIView):
    """What hosting does, for Prometheus."""

    permission_classes = [IsViewer]

    @extend_schema(exclude=True)
    def get(self, request: Request) -> HttpResponse:
        """Answer in the text format, whatever was asked for."""
        registry = CollectorRegistry()
        registry.register(_Hosting(database_now()))
        return HttpResponse(
            generate_latest(registry),
            content_type=_CONTENT_TYPE,
            headers={"Cache-Control": "no-store"},
        )


class _Hosting(Collector):
    """Labels are pools and models that are registered, numbers of replicas, and states."""

    def __init__(self, now: datetime) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """Read the metrics."""
        build = GaugeMetricFamily("airs_build_info", "1, of this version", labels=["version"])
        build.add_metric([version("airs")], 1)
        return build, self._busy(), self._replicas(), self._duty()

    def _busy(self) -> Metric:
        metric = CounterMetricFamily(
            "airs_model_busy_seconds",
            "Seconds in which a replica computed, of its run",
            labels=["pool", "model", "replica"],
        )
        sums = (
            ModelServer.objects.values_list("model__pool_id", "model_id", "ordinal")
            .order_by("model_id", "ordinal")
            # A pool that went to another agent may have left a replica of the same number there.
            .annotate(Sum("busy_seconds"))
        )
        for pool_id, model_id, ordinal, busy_s in sums:
            metric.add_metric([pool_id or "", model_id, str(ordinal)], busy_s)
        return metric

    def _replicas(self) -> Metric:
        metric = GaugeMetricFamily(
            "airs_replicas", "Replicas by state", labels=["pool", "model", "state"]
        )
        states = Counter(ModelServer.objects.values_list("model_id", "state"))
        hosted = ModelConfig.objects.filter(kind=ModelKind.HOSTED).order_by("pk")
        for model_id, pool_id in hosted.values_list("pk", "pool_id"):
            for state in ServerState:
                metric.add_metric([pool_id or "", model_id, state], states[model_id, state.value])
        return metric

    def _duty(self) -> Metric:
        metric = GaugeMetricFamily(
            "airs_duty_cycle_ratio",
            "Busy over lived seconds of the devices of a pool in the last five minutes; "
            "nothing while no replica lives",
            labels=["pool"],
        )
        for pool_id in AcceleratorPool.objects.order_by("pk").values_list("pk", flat=True):
            (share,) = utilisation.duty([_DUTY], now=self._now, pool_id=pool_id)
            if share is not None:
                metric.add_metric([pool_id], share)
        return metric
