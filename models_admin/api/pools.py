"""Views of pools, and of what the rebalancer decided for them."""

import re
from typing import Any, cast

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin import services
from models_admin.api.access import View, actor, answers, given_by, page
from models_admin.api.forms import PoolChanges, PoolForm
from models_admin.api.shapes import DecisionList, DecisionShape, PoolList, PoolShape
from models_admin.models import AcceleratorPool, RebalanceDecision

_MOST_DECISIONS = 100


class PoolsView(View):
    """All pools, and registering one."""

    @extend_schema(operation_id="list_pools", responses=answers(PoolList, 200))
    def get(self, request: Request) -> Response:
        """List pools by id."""
        pools = AcceleratorPool.objects.select_related("outlook").order_by("pk")
        found, following = page(request, pools)
        return Response({"items": [_pool(pool) for pool in found], "next": following})

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
            _pool(pool),
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/pools/{pool.pk}"},
        )


class PoolView(View):
    """One pool."""

    @extend_schema(operation_id="get_pool", responses=answers(PoolShape, 200, 404))
    def get(self, request: Request, pool_id: str) -> Response:
        """Show a pool."""
        return Response(_pool(services.find_pool(pool_id)))

    @extend_schema(
        operation_id="change_pool",
        request=PoolChanges,
        responses=answers(PoolShape, 200, 400, 404, 422),
    )
    def patch(self, request: Request, pool_id: str) -> Response:
        """Change a pool; it keeps the devices that started models use."""
        pool = services.change_pool(pool_id, given_by(PoolChanges, request), actor=actor(request))
        return Response(_pool(pool))

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
        found = RebalanceDecision.objects.filter(pool_id=pool.pk).order_by("-pk")
        cursor = request.query_params.get("cursor", "")
        if re.fullmatch(r"[0-9]{1,18}", cursor):
            found = found.filter(pk__lt=int(cursor))
        rows = list(found[: _MOST_DECISIONS + 1])
        items = rows[:_MOST_DECISIONS]
        following = str(items[-1].pk) if len(rows) > _MOST_DECISIONS else None
        return Response({"items": DecisionShape(items, many=True).data, "next": following})


def _pool(pool: AcceleratorPool) -> dict[str, Any]:
    pool.devices_used = services.devices_used(pool.pk)  # type: ignore[attr-defined]
    return cast(dict[str, Any], PoolShape(pool).data)
