"""What the columns of a table must be, for CSV and Parquet alike."""

from collections.abc import Sequence

from fulfillment.errors import BadUpload
from fulfillment.formats.rows import QUERY_FIELDS

_SHOWN = 30


def check_names(names: Sequence[str], *, hint: str = "") -> None:
    """Raise BadUpload unless the columns have different names and one of them is the query."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise BadUpload(
            f"the header has the same name twice: {shown(repeated)}; rename or drop one of each",
            code="duplicate_column",
            errors=[
                {"field": name[:64], "code": "duplicate_column", "detail": "stands more than once"}
                for name in repeated[:_SHOWN]
            ],
        )
    if not set(QUERY_FIELDS).intersection(names):
        raise BadUpload(
            f"there is no column query_text (or query); found: {shown(names)}"
            + (hint or _near(names)),
            code="missing_column",
            errors=[
                {
                    "field": "query_text",
                    "code": "missing_column",
                    "detail": "every row needs a query",
                }
            ],
            header=[name[:64] for name in names[:_SHOWN]],
        )


def shown(names: Sequence[str]) -> str:
    """Return the names for a message, not more and no longer ones than a person reads."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name[:64]) for name in names[:_SHOWN]) + more


def _near(names: Sequence[str]) -> str:
    near = [name for name in names if name.strip().lower().replace(" ", "_") in QUERY_FIELDS]
    return f"; names are compared letter by letter, {near[0]!r} is another one" if near else ""
