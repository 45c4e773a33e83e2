"""`airs archive`: what was rated before."""

import json
import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from airs_client.commands import BRIEF, OutputOption, client_of, output_of, show_raw, talk

archive_app = typer.Typer(help="What was rated before.", no_args_is_help=True)


@archive_app.command("explain")
def explain(
    context: typer.Context,
    rater: Annotated[str, typer.Option("--rater", "-r", help="Id of a rater.")],
    row: Annotated[str, typer.Argument(metavar="ROW", help="One row as JSON, or - for stdin.")],
    bypass: Annotated[bool, typer.Option("--bypass", help="As for a workflow.")] = False,
    output: OutputOption = None,
) -> None:
    """Show what a row is known by, which ratings there are, and what it would get now."""
    fields = _key_fields(sys.stdin.read() if row == "-" else row)
    with client_of(context, BRIEF) as airs:
        found = airs.archive.explain(fields, rater=rater, bypass=bypass)
    show_raw(found, output_of(context, output))


@archive_app.command("purge")
def purge(
    context: typer.Context,
    rater: Annotated[str | None, typer.Option("--rater", "-r", help="Id of a rater.")] = None,
    number: Annotated[
        int | None, typer.Option("--version", min=1, help="Number of a version of the rater.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Blanks requests and payloads of the url, too.")
    ] = None,
    before: Annotated[
        datetime | None, typer.Option("--before", help="What was rated before then, in UTC.")
    ] = None,
    erase: Annotated[bool, typer.Option("--erase", help="Erase it; else only count it.")] = False,
    output: OutputOption = None,
) -> None:
    """Count or erase ratings that meet all criteria given."""
    with client_of(context, BRIEF) as airs:
        found = airs.archive.purge(
            rater=rater,
            version=number,
            url=url,
            before=before.replace(tzinfo=UTC) if before else None,
            dry_run=not erase,
        )
    show_raw(found, output_of(context, output))
    if found.get("state") == "running":
        talk(f"It goes on. Look again with: airs archive purge-state {found.get('id')}")


@archive_app.command("purge-state")
def purge_state(
    context: typer.Context,
    purge_id: Annotated[str, typer.Argument(metavar="ID", help="Id of a purge.")],
    output: OutputOption = None,
) -> None:
    """Show how far a large purge is."""
    with client_of(context, BRIEF) as airs:
        show_raw(airs.archive.purge_state(purge_id), output_of(context, output))


def _key_fields(text: str) -> dict[str, Any]:
    """Return the fields of a row that may decide its score."""
    try:
        row = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"the row is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise typer.BadParameter("the row is no JSON object")
    known = ("query_text", "url", "title", "text", "html", "context")
    return {"query_text": row.get("query"), **{k: row[k] for k in known if k in row}}
