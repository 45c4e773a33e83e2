"""Groups of admin users, one for each role that tokens have below `admin`.

A user of a group needs `staff status`, too. The groups are set anew at each start, so that they
cover the tables of a newer version: who needs other rights makes a group of another name.
"""

from typing import Final

from django.contrib.auth.models import Group, Permission
from django.db.models import Q

from fulfillment.models import Role

_APPS: Final = ("fulfillment", "models_admin", "django_celery_beat")
_OPERATORS_SEE: Final = ("webhookendpoint", "delivery", "deliveryattempt", "purge")
"""Theirs by REST as well: addresses of others, and what was erased."""
_ADMINS_SEE: Final = ("apitoken",)
_OPERATORS_EDIT: Final = {
    "fulfillment": ("rater", "priorityrule", "ownershare"),
    "models_admin": ("acceleratorpool", "modelconfig", "trafficrule"),
}
_OPERATORS_ACT: Final = ("change_workflow", "change_delivery", "delete_webhookendpoint")


def make_groups() -> list[str]:
    """Make or renew the groups; return the names of those that are new."""
    seen = Q(content_type__app_label__in=_APPS, codename__startswith="view_")
    hidden = Q(content_type__model__in=_ADMINS_SEE)
    others = Q(content_type__model__in=_OPERATORS_SEE)
    edits = Q(content_type__app_label="fulfillment", codename__in=_OPERATORS_ACT)
    for app, tables in _OPERATORS_EDIT.items():
        edits |= Q(content_type__app_label=app, content_type__model__in=tables)
    watches = seen & ~hidden & ~others
    # The admin knows no owners: who may steer one workflow there may steer all. A submitter steers
    # its own by REST and the command line.
    rights = {
        Role.VIEWER: watches,
        Role.SUBMITTER: watches,
        Role.OPERATOR: (seen & ~hidden) | edits,
    }
    return [role.value for role, right in rights.items() if _make(role.value, right)]


def _make(name: str, right: Q) -> bool:
    group, is_new = Group.objects.get_or_create(name=name)
    group.permissions.set(Permission.objects.filter(right))
    return is_new
