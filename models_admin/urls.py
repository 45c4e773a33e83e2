"""Addresses of model management below /api/v1."""

from django.urls import path

from models_admin import api

urlpatterns = [
    path("models", api.ModelsView.as_view()),
    path("models/<slug:model_id>", api.ModelView.as_view()),
    path("models/<slug:model_id>/start", api.ModelStartView.as_view()),
    path("models/<slug:model_id>/stop", api.ModelStopView.as_view()),
    path("models/<slug:model_id>/restart", api.ModelRestartView.as_view()),
    path("models/<slug:model_id>/resize", api.ModelResizeView.as_view()),
    path("models/<slug:model_id>/address", api.ModelAddressView.as_view()),
    path("pools", api.PoolsView.as_view()),
    path("pools/<slug:pool_id>", api.PoolView.as_view()),
    path("pools/<slug:pool_id>/decisions", api.PoolDecisionsView.as_view()),
]
