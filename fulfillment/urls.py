"""Addresses of Rating Fulfillment below /api/v1."""

from django.urls import path

from fulfillment import api

urlpatterns = [
    path("workflows", api.WorkflowsView.as_view()),
    path("workflows/<str:public_id>", api.WorkflowView.as_view()),
    path("workflows/<str:public_id>/requests", api.WorkflowRequestsView.as_view()),
    path("workflows/<str:public_id>/close", api.WorkflowCloseView.as_view()),
    path("workflows/<str:public_id>/cancel", api.WorkflowCancelView.as_view()),
    path("workflows/<str:public_id>/ratings", api.RatingsView.as_view()),
    path("raters", api.RatersView.as_view()),
    path("raters/<slug:rater_id>", api.RaterView.as_view()),
    path("raters/<slug:rater_id>/versions", api.RaterVersionsView.as_view()),
    path("tokens", api.TokensView.as_view()),
    path("tokens/<str:token_id>", api.TokenView.as_view()),
]
