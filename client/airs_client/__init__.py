"""Python client of AIRS, the AI Rater Service.

    from airs_client import Client

    with Client() as airs:                      # AIRS_URL, AIRS_API_TOKEN or a profile
        sent = airs.workflows.submit("results.jsonl", rater="needs_met")
        airs.workflows.wait(sent.workflow.id)
        for rating in airs.workflows.ratings(sent.workflow.id):
            ...

`AsyncClient` has the same calls to be awaited. The `airs` command (`airs_client.cli`) is built on
`Client`. Every exception is an `AirsError`.
"""

from airs_client.client import AsyncClient, Client
from airs_client.connection import Connection, InvalidSettings, resolve
from airs_client.errors import (
    AirsError,
    ApiError,
    AuthError,
    Conflict,
    InvalidInput,
    NotFound,
    ProblemItem,
    RateLimited,
    ServerError,
    SourceChanged,
    SourceUnreadable,
    UnexpectedAnswer,
    Unreachable,
    UnusableId,
    WaitTimedOut,
    WorkflowNotCompleted,
)
from airs_client.results import (
    Counts,
    Decision,
    Distributions,
    Estimate,
    Eta,
    Event,
    Forecast,
    Model,
    Move,
    Page,
    Pool,
    Rater,
    Rating,
    Remedy,
    RowProblem,
    Sources,
    Spread,
    Submission,
    Timeline,
    Webhook,
    Workflow,
)
from airs_client.retries import Retries

__all__ = [
    "AirsError",
    "ApiError",
    "AsyncClient",
    "AuthError",
    "Client",
    "Conflict",
    "Connection",
    "Counts",
    "Decision",
    "Distributions",
    "Estimate",
    "Eta",
    "Event",
    "Forecast",
    "InvalidInput",
    "InvalidSettings",
    "Model",
    "Move",
    "NotFound",
    "Page",
    "Pool",
    "ProblemItem",
    "RateLimited",
    "Rater",
    "Rating",
    "Remedy",
    "Retries",
    "RowProblem",
    "ServerError",
    "SourceChanged",
    "SourceUnreadable",
    "Sources",
    "Spread",
    "Submission",
    "Timeline",
    "UnexpectedAnswer",
    "Unreachable",
    "UnusableId",
    "WaitTimedOut",
    "Webhook",
    "Workflow",
    "WorkflowNotCompleted",
    "resolve",
]
