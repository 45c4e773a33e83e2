"""Acts upon workflows from the admin's list: each is confirmed on a page that says what it does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse

from fulfillment import control
from fulfillment.errors import FulfillmentError
from fulfillment.models import Workflow
from fulfillment.policy.lifecycle import Act, WorkflowState

MOST_AT_ONCE = 100
"""Workflows that one action takes: each may end some thousands of requests within the call."""

Action = Callable[[Any, HttpRequest, QuerySet[Workflow]], TemplateResponse | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """An act as the admin offers it."""

    service: Callable[..., Workflow]
    done: str
    meaning: str


_FORMS = {
    Act.PAUSE: _Form(
        service=control.pause,
        done="Paused.",
        meaning="Nothing more is sent of these workflows until they are resumed. What was started "
        "ends; deadlines go on.",
    ),
    Act.RESUME: _Form(
        service=control.resume, done="Resumed.", meaning="These workflows are sent again."
    ),
    Act.CANCEL: _Form(
        service=control.cancel,
        done="Cancelled.",
        meaning="These workflows end now as CANCELLED. What is rated stays; open requests become "
        "CANCELLED.",
    ),
    Act.COMPLETE: _Form(
        service=control.complete,
        done="Completed.",
        meaning="These workflows end now as what their requests say. Open requests are not "
        "awaited: they become CANCELLED, and what comes late enters the archive only.",
    ),
    Act.RETRY: _Form(
        service=control.retry,
        done="Retried.",
        meaning="The requests of these workflows that did not complete are rated in a new round, "
        "with a fresh deadline.",
    ),
}


def _action(act: Act, form: _Form) -> Action:
    def run(
        site: Any, request: HttpRequest, queryset: QuerySet[Workflow]
    ) -> TemplateResponse | None:
        workflows = list(queryset.order_by("-pk")[: MOST_AT_ONCE + 1])
        if len(workflows) > MOST_AT_ONCE:
            site.message_user(request, f"Choose {MOST_AT_ONCE} at most.", messages.ERROR)
            return None
        if "confirmed" not in request.POST:
            return TemplateResponse(
                request,
                "admin/confirm_act.html",
                {
                    **site.admin_site.each_context(request),
                    "title": f"{act.value.capitalize()} {len(workflows)} workflows",
                    "opts": Workflow._meta,
                    "act": act.value,
                    "meaning": form.meaning,
                    "chosen": [(workflow, _now(workflow)) for workflow in workflows],
                    "back": request.get_full_path(),
                },
            )
        for workflow in workflows:
            _do(site, request, form, workflow)
        return None

    run.__name__ = act.value
    decorated: Action = admin.action(
        run, permissions=["act"], description=f"{act.value.capitalize()} selected workflows"
    )
    return decorated


def _now(workflow: Workflow) -> str:
    said = (workflow.name, workflow.get_state_display(), f"of {workflow.owner}")
    return ", ".join(filter(None, said))


def _do(site: Any, request: HttpRequest, form: _Form, workflow: Workflow) -> None:
    try:
        after = form.service(workflow_id=workflow.pk, actor=request.user.get_username())
    except FulfillmentError as error:
        site.message_user(request, error.detail, messages.ERROR)
    else:
        site.log_change(request, workflow, form.done)
        state = WorkflowState(after.state).name
        site.message_user(request, f"Workflow {workflow.public_id} is {state}.")


ACTIONS = tuple(_action(act, form) for act, form in _FORMS.items())
"""Actions of the list of workflows; they ask for the permission `act`."""
