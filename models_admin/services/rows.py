"""Rows: finding them, reading them to compare them, and locking models."""

from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from models_admin.errors import Conflict, NotFound
from models_admin.models import AcceleratorPool, ModelConfig, ModelKind

Row = TypeVar("Row", bound=Model)


def named(rows: QuerySet[Row], name: str, what: str) -> Row:
    """Return the row of that id; raises NotFound, saying `what` there is none of."""
    row = rows.filter(pk=name).first()
    if row is None:
        raise NotFound(f"There is no {what} {name!r}.")
    return row


def values(row: AcceleratorPool | ModelConfig, ignored: frozenset[str] = frozenset()) -> Any:
    """Return what a row holds, by column."""
    return {
        field.attname: getattr(row, field.attname)
        for field in row._meta.concrete_fields
        if field.name not in ignored
    }


def lock(model_id: str) -> ModelConfig:
    """Return a model and hold its row until the transaction ends; raises NotFound."""
    return named(ModelConfig.objects.select_for_update(), model_id, "model")


def lock_hosted(model_id: str) -> ModelConfig:
    """The same; raises Conflict if it is external."""
    model = lock(model_id)
    if model.kind != ModelKind.HOSTED:
        raise Conflict(
            f"Model {model_id!r} is external: AIRS does not run its server.", code="not_hosted"
        )
    return model
