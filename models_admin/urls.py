"""Addresses of model management below /api/v1."""

from django.urls import path

from models_admin.api import models, pools

urlpatterns = [
    path("models", models.ModelsView.as_view()),
    path("models/<slug:model_id>", models.ModelView.as_view()),
    path("models/<slug:model_id>/start", models.ModelStartView.as_view()),
    path("models/<slug:model_id>/stop", models.ModelStopView.as_view()),
    path("models/<slug:model_id>/restart", models.ModelRestartView.as_view()),
    path("models/<slug:model_id>/resize", models.ModelResizeView.as_view()),
    path("models/<slug:model_id>/address", models.ModelAddressView.as_view()),
    path("pools", pools.PoolsView.as_view()),
    path("pools/<slug:pool_id>", pools.PoolView.as_view()),
    path("pools/<slug:pool_id>/decisions", pools.PoolDecisionsView.as_view()),
]
