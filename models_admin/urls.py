"""Addresses of model management below /api/v1."""

from django.urls import path

from models_admin.api import (
    audit,
    externals,
    models,
    pools,
    quota,
    traffic_rules,
    trials,
    utilisation,
    versions,
)

urlpatterns = [
    path("audit", audit.AuditView.as_view()),
    path("models", models.ModelsView.as_view()),
    path("models/<slug:model_id>", models.ModelView.as_view()),
    path("models/<slug:model_id>/start", models.ModelStartView.as_view()),
    path("models/<slug:model_id>/stop", models.ModelStopView.as_view()),
    path("models/<slug:model_id>/restart", models.ModelRestartView.as_view()),
    path("models/<slug:model_id>/resize", models.ModelResizeView.as_view()),
    path("models/<slug:model_id>/try", trials.ModelTryView.as_view()),
    path("models/<slug:model_id>/versions", versions.ModelVersionsView.as_view()),
    path(
        "models/<slug:model_id>/versions/<str:version>/retire",
        versions.ModelVersionRetireView.as_view(),
    ),
    path("models/<slug:model_id>/address", models.ModelAddressView.as_view()),
    path("models/<slug:model_id>/check", externals.ModelCheckView.as_view()),
    path("models/<slug:model_id>/utilisation", utilisation.ModelUtilisationView.as_view()),
    path("pools", pools.PoolsView.as_view()),
    path("pools/<slug:pool_id>", pools.PoolView.as_view()),
    path("pools/<slug:pool_id>/decisions", pools.PoolDecisionsView.as_view()),
    path("pools/<slug:pool_id>/utilisation", utilisation.PoolUtilisationView.as_view()),
    path("quota/<slug:name>", quota.QuotaView.as_view()),
    path("traffic-rules", traffic_rules.TrafficRulesView.as_view()),
    path("traffic-rules/<str:rule_id>", traffic_rules.TrafficRuleView.as_view()),
]
