"""Addresses of Rating Fulfillment below /api/v1."""

from django.urls import path

from fulfillment.api import (
    archive,
    control,
    estimates,
    events,
    priorities,
    queue,
    raters,
    ratings,
    tokens,
    webhooks,
    workflows,
)

urlpatterns = [
    path("workflows", workflows.WorkflowsView.as_view()),
    path("workflows/<str:public_id>", workflows.WorkflowView.as_view()),
    path("workflows/<str:public_id>/requests", workflows.WorkflowRequestsView.as_view()),
    path("workflows/<str:public_id>/close", control.WorkflowCloseView.as_view()),
    path("workflows/<str:public_id>/pause", control.WorkflowPauseView.as_view()),
    path("workflows/<str:public_id>/resume", control.WorkflowResumeView.as_view()),
    path("workflows/<str:public_id>/cancel", control.WorkflowCancelView.as_view()),
    path("workflows/<str:public_id>/complete", control.WorkflowCompleteView.as_view()),
    path("workflows/<str:public_id>/retry", control.WorkflowRetryView.as_view()),
    path("workflows/<str:public_id>/ratings", ratings.RatingsView.as_view()),
    path("workflows/<str:public_id>/distributions", queue.DistributionsView.as_view()),
    path("queue", queue.QueueView.as_view()),
    path("queue/history", queue.QueueHistoryView.as_view()),
    path("workflows/<str:public_id>/events", events.WorkflowEventsView.as_view()),
    path("webhook-endpoints", webhooks.WebhookEndpointsView.as_view()),
    path("webhook-endpoints/<str:endpoint_id>", webhooks.WebhookEndpointView.as_view()),
    path(
        "webhook-endpoints/<str:endpoint_id>/deliveries",
        webhooks.WebhookDeliveriesView.as_view(),
    ),
    path(
        "webhook-endpoints/<str:endpoint_id>/deliveries/<str:delivery_id>/replay",
        webhooks.WebhookReplayView.as_view(),
    ),
    path("raters", raters.RatersView.as_view()),
    path("raters/<slug:rater_id>", raters.RaterView.as_view()),
    path("raters/<slug:rater_id>/versions", raters.RaterVersionsView.as_view()),
    path(
        "raters/<slug:rater_id>/versions/<int:number>/retire",
        raters.RaterVersionRetireView.as_view(),
    ),
    path(
        "raters/<slug:rater_id>/promotion-estimate",
        estimates.PromotionEstimateView.as_view(),
    ),
    path("estimates", estimates.EstimatesView.as_view()),
    path("archive/explain", archive.ArchiveExplainView.as_view()),
    path("archive/purge", archive.ArchivePurgeView.as_view()),
    path("archive/purges", archive.ArchivePurgesView.as_view()),
    path("archive/purges/<str:purge_id>", archive.ArchivePurgeStateView.as_view()),
    path("archive/staleness", archive.ArchiveStalenessView.as_view()),
    path("priority-rules", priorities.PriorityRulesView.as_view()),
    path("priority-rules/preview", priorities.PriorityPreviewView.as_view()),
    path("priority-rules/<str:rule_id>", priorities.PriorityRuleView.as_view()),
    path("owners", priorities.OwnersView.as_view()),
    path("owners/<path:owner>/share", priorities.OwnerShareView.as_view()),
    path("tokens", tokens.TokensView.as_view()),
    path("tokens/<str:token_id>", tokens.TokenView.as_view()),
]
