"""Addresses of Rating Fulfillment below /api/v1."""

from django.urls import path

from fulfillment.api import control, raters, ratings, tokens, workflows

urlpatterns = [
    path("workflows", workflows.WorkflowsView.as_view()),
    path("workflows/<str:public_id>", workflows.WorkflowView.as_view()),
    path("workflows/<str:public_id>/requests", workflows.WorkflowRequestsView.as_view()),
    path("workflows/<str:public_id>/close", workflows.WorkflowCloseView.as_view()),
    path("workflows/<str:public_id>/cancel", control.WorkflowCancelView.as_view()),
    path("workflows/<str:public_id>/ratings", ratings.RatingsView.as_view()),
    path("raters", raters.RatersView.as_view()),
    path("raters/<slug:rater_id>", raters.RaterView.as_view()),
    path("raters/<slug:rater_id>/versions", raters.RaterVersionsView.as_view()),
    path("tokens", tokens.TokensView.as_view()),
    path("tokens/<str:token_id>", tokens.TokenView.as_view()),
]
