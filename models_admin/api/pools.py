"""Views of pools, and of what the rebalancer decided for them."""

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin import services
from models_admin.api.access import View, actor, answers, given_by, newest, page
from models_admin.api.forms import PoolChanges, PoolForm
from models_admin.models import AcceleratorPool, Outcome, PoolOutlook, RebalanceDecision

_MOST_DECISIONS = 100


class OutlookShape(serializers.ModelSerializer[PoolOutlook]):
    """What the rebalancer last found of a pool."""

    needs = serializers.DictField(
        child=serializers.FloatField(), help_text="Replicas that each model needs"
    )

    class Meta:
        model = PoolOutlook
        fields = ("at", "needs", "reason", "signal_age_s")


class PoolShape(serializers.ModelSerializer[AcceleratorPool]):
    """A pool."""

    devices_used = serializers.IntegerField(help_text="By started models")
    outlook = OutlookShape(allow_null=True)

    class Meta:
        model = AcceleratorPool
        fields = (
            *("id", "kind", "devices", "devices_used", "agent", "rebalancing", "outlook", "notes"),
        )


class PoolList(serializers.Serializer[Any]):
    """Pools by id."""

    items = PoolShape(many=True)
    next = serializers.CharField(allow_null=True)


class MoveShape(serializers.Serializer[Any]):
    """Another number of replicas for a model."""

    model = serializers.CharField()
    before = serializers.IntegerField()
    after = serializers.IntegerField()


class DecisionShape(serializers.ModelSerializer[RebalanceDecision]):
    """A round of the rebalancer."""

    outcome = serializers.ChoiceField(choices=Outcome.choices)
    moves = MoveShape(many=True)
    needs = serializers.DictField(child=serializers.FloatField(), help_text="Replicas by model")
    targets = serializers.DictField(child=serializers.FloatField(), help_text="Replicas by model")

    class Meta:
        model = RebalanceDecision
        fields = (
            *("id", "at", "mode", "outcome", "applied", "moves", "needs", "targets", "reason"),
            "signal_age_s",
        )


class DecisionList(serializers.Serializer[Any]):
    """Decisions, the newest first."""

    items = DecisionShape(many=True)
    next = serializers.CharField(allow_null=True)


class PoolsView(View):
    """All pools, and registering one."""

    @extend_schema(operation_id="list_pools", responses=answers(PoolList, 200))
    def get(self, request: Request) -> Response:
        """List pools by id."""
        pools = services.with_use(AcceleratorPool.objects.select_related("outlook"))
        found, following = page(request, pools.order_by("pk"))
        return Response({"items": PoolShape(found, many=True).data, "next": following})

    @extend_schema(
        operation_id="register_pool",
        request=PoolForm,
        responses=answers(PoolShape, 201, 400, 409, 422),
    )
    def post(self, request: Request) -> Response:
        """Register a pool; the same one again changes nothing."""
        pool, is_new = services.register_pool(
            AcceleratorPool(**given_by(PoolForm, request)), actor=actor(request)
        )
        return Response(
            _shown(pool.pk),
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/pools/{pool.pk}"},
        )


class PoolView(View):
    """One pool."""

    @extend_schema(operation_id="get_pool", responses=answers(PoolShape, 200, 404))
    def get(self, request: Request, pool_id: str) -> Response:
        """Show a pool."""
        return Response(_shown(pool_id))

    @extend_schema(
        operation_id="change_pool",
        request=PoolChanges,
        responses=answers(PoolShape, 200, 400, 404, 422),
    )
    def patch(self, request: Request, pool_id: str) -> Response:
        """Change a pool; it keeps the devices that started models use."""
        services.change_pool(pool_id, given_by(PoolChanges, request), actor=actor(request))
        return Response(_shown(pool_id))

    @extend_schema(operation_id="remove_pool", responses=answers(None, 204, 404, 409))
    def delete(self, request: Request, pool_id: str) -> Response:
        """Remove a pool that no model belongs to."""
        services.remove_pool(pool_id, actor=actor(request))
        return Response(status=204)


class PoolDecisionsView(View):
    """What the rebalancer decided for a pool."""

    @extend_schema(
        operation_id="list_pool_decisions",
        parameters=[OpenApiParameter("cursor", str, description="`next` of the page before")],
        responses=answers(DecisionList, 200, 404),
    )
    def get(self, request: Request, pool_id: str) -> Response:
        """List decisions, the newest first; rounds without news are kept each ten minutes."""
        pool = services.find_pool(pool_id)
        found = RebalanceDecision.objects.filter(pool_id=pool.pk)
        items, following = newest(request, found, _MOST_DECISIONS)
        return Response({"items": DecisionShape(items, many=True).data, "next": following})


def _shown(pool_id: str) -> Any:
    return PoolShape(services.find_pool(pool_id)).data
