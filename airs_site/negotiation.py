"""Answers of the API do not depend on Accept."""

from typing import Any

from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request


class AlwaysJson(DefaultContentNegotiation):
    """A client that asks for something else gets JSON rather than 406."""

    def select_renderer(
        self,
        request: Request,
        renderers: Any,
        format_suffix: str | None = None,
    ) -> tuple[BaseRenderer, str]:
        first: BaseRenderer = renderers[0]
        return first, first.media_type or "application/json"
