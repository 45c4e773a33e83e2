"""Addresses: admin, REST, schema, health and metrics."""

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from rest_framework.negotiation import DefaultContentNegotiation

from airs_site import health
from airs_site.metrics import MetricsView

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("api/v1/", include("fulfillment.urls")),
    path("api/v1/", include("models_admin.urls")),
    # These two do have more than one form to offer.
    path(
        "api/schema",
        SpectacularAPIView.as_view(content_negotiation_class=DefaultContentNegotiation),
        name="schema",
    ),
    path(
        # Split: its script is a request of its own, as the content security policy asks.
        "api/docs",
        SpectacularSwaggerSplitView.as_view(
            url_name="schema", content_negotiation_class=DefaultContentNegotiation
        ),
        name="docs",
    ),
    path("healthz", health.live),
    path("readyz", health.ready),
    path("metrics", MetricsView.as_view()),
]

handler400 = "airs_site.problems.bad_request"
handler403 = "airs_site.problems.permission_denied"
handler404 = "airs_site.problems.page_not_found"
handler500 = "airs_site.problems.server_error"
