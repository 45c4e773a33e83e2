"""The `airs` command: data on standard output, talk on standard error.

Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 finished with failed or refused items,
130 interrupted. Nothing here decides how a call is made; see `client`.
"""

import sys
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.console import Console

from airs_client import rendering
from airs_client.archive_commands import archive_app
from airs_client.client import Client
from airs_client.commands import (
    BRIEF,
    Globals,
    Output,
    OutputOption,
    client_of,
    data,
    output_of,
    show_json,
    show_line,
    show_list,
    show_raw,
    talk,
)
from airs_client.connection import InvalidSettings
from airs_client.displays import display_on
from airs_client.durations import duration_from
from airs_client.errors import AirsError, NotFound, SourceUnreadable, UnusableId
from airs_client.files import whole_file
from airs_client.model_commands import models_app
from airs_client.pool_commands import pools_app
from airs_client.results import Distributions, Submission, Workflow
from airs_client.retries import Retries


class Results(StrEnum):
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"


class RowFormat(StrEnum):
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"


FAILED, USAGE, PARTIAL, INTERRUPTED = 1, 2, 3, 130

_SENDING = Retries(max_retries=6)
# A server that restarts is no reason to stop looking at a workflow that goes on without us.
_WATCHING = Retries(max_retries=30)

app = typer.Typer(
    help="Submit search, RAG or LLM results to AIRS for rating, watch them and fetch the scores.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
raters_app = typer.Typer(help="The raters that can be named.", no_args_is_help=True)
app.add_typer(raters_app, name="raters")
app.add_typer(models_app, name="models")
app.add_typer(pools_app, name="pools")
app.add_typer(archive_app, name="archive")

WorkflowId = Annotated[str, typer.Argument(metavar="ID", help="Id of a workflow.")]
RaterId = Annotated[str, typer.Argument(metavar="ID", help="Id of a rater.")]


def main() -> None:
    """Entry point of the `airs` script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and answer its exit code; no error escapes as a traceback."""
    try:
        app(args=arguments, prog_name="airs")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (SourceUnreadable, UnusableId, InvalidSettings) as error:
        talk(rendering.problem(error))
        return USAGE
    except AirsError as error:
        talk(rendering.problem(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the outermost step: whatever it is, a person reads it
        talk(f"error: unexpected {type(error).__name__}: {rendering.printable(str(error))}")
        return FAILED
    return 0


@app.callback()
def options(
    context: typer.Context,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="text for people, or json.")
    ] = Output.text,
    url: Annotated[
        str | None, typer.Option("--url", help="Address of the server, before AIRS_URL.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="Profile of ~/.config/airs/config.toml, before AIRS_URL."),
    ] = None,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda wanted: _show_version(wanted),
            is_eager=True,
            help="Show the version and stop.",
        ),
    ] = False,
) -> None:
    context.obj = Globals(url=url, profile=profile, output=output)


@app.command()
def submit(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE|-", help="JSON Lines, CSV or Parquet, .gz too; - is stdin."),
    ],
    rater: Annotated[str, typer.Option("--rater", help="Id of the rater; see `raters list`.")],
    priority: Annotated[
        int | None, typer.Option("--priority", min=0, max=100, help="Larger is more urgent.")
    ] = None,
    deadline: Annotated[
        timedelta | None,
        typer.Option(
            "--deadline",
            parser=lambda text: _deadline(text),
            metavar="DURATION",
            help="No new try starts after it: 2h, 90m, 1h30m …",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Default: the file's name.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch it to its end.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="A new workflow even if the file was sent before.")
    ] = False,
    bypass: Annotated[
        bool, typer.Option("--bypass", help="Take no rating that the archive had before.")
    ] = False,
    webhook: Annotated[
        str | None, typer.Option("--webhook", metavar="URL", help="An address to tell of the end.")
    ] = None,
    row_format: Annotated[
        RowFormat | None, typer.Option("--format", help="Default: by the file's name or beginning.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Send a file of rows to be rated; prints the workflow's id.

    The same file with the same options is one workflow, however often it is sent.
    """
    with client_of(context, _SENDING) as airs:
        try:
            sent = airs.workflows.submit(
                sys.stdin.buffer if file == "-" else Path(file),
                rater=rater,
                name=name or ("stdin" if file == "-" else None),
                priority=priority,
                deadline=deadline,
                bypass=bypass,
                webhook=webhook,
                format=row_format.value if row_format else None,
                idempotency_key=f"airs-{uuid.uuid4().hex}" if again else None,
            )
        except KeyboardInterrupt:
            talk("Interrupted. All of the file was taken or nothing; sending it again is safe.")
            raise typer.Exit(INTERRUPTED) from None
    as_json = output_of(context, output) is Output.json
    talk(rendering.submission(sent))
    if not as_json:
        data(sent.workflow.id)
    if not wait:
        talk(f"Follow it with: airs watch {sent.workflow.id}")
    ended = _follow(context, sent.workflow.id) if wait else None
    if as_json:
        show_json({**sent.raw, **ended.raw} if ended else sent.raw)
    raise typer.Exit(_submit_code(sent, ended))


@app.command()
def estimate(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE|-", help="JSON Lines, CSV or Parquet, .gz too; - is stdin."),
    ],
    rater: Annotated[str, typer.Option("--rater", help="Id of the rater; see `raters list`.")],
    priority: Annotated[
        int | None, typer.Option("--priority", min=0, max=100, help="Larger is more urgent.")
    ] = None,
    deadline: Annotated[
        timedelta | None,
        typer.Option(
            "--deadline",
            parser=lambda text: _deadline(text),
            metavar="DURATION",
            help="Default: the rater's.",
        ),
    ] = None,
    sample_of: Annotated[
        int | None,
        typer.Option("--sample-of", min=1, metavar="ROWS", help="FILE is a sample of so many."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1)] = None,
    bypass: Annotated[
        bool, typer.Option("--bypass", help="Take no rating that the archive had before.")
    ] = False,
    row_format: Annotated[
        RowFormat | None, typer.Option("--format", help="Default: by the file's name or beginning.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Say what a file would bring and cost, and whether it would be rated in time.

    Its rows are checked as those of `submit`, and nothing is stored.
    """
    with client_of(context, _SENDING) as airs:
        found = airs.workflows.estimate(
            sys.stdin.buffer if file == "-" else Path(file),
            rater=rater,
            priority=priority,
            deadline=deadline,
            batch_size=batch_size,
            bypass=bypass,
            sample_of=sample_of,
            format=row_format.value if row_format else None,
        )
    if output_of(context, output) is Output.json:
        show_json(found.raw)
    else:
        data(rendering.estimate(found))
    if found.rejected:
        talk(rendering.refused(found.rejected))
        raise typer.Exit(PARTIAL)


@app.command()
def watch(context: typer.Context, workflow_id: WorkflowId, output: OutputOption = None) -> None:
    """Show a workflow's progress until it ends. Ctrl-C stops watching, not the workflow."""
    workflow = _follow(context, workflow_id)
    _show_workflow(workflow, output_of(context, output))
    raise typer.Exit(_ending_code(workflow))


@app.command()
def status(
    context: typer.Context,
    workflow_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Without it: the latest workflows.")
    ] = None,
    state: Annotated[str | None, typer.Option("--state", help="Only those in it.")] = None,
    cursor: Annotated[str | None, typer.Option("--cursor", help="Where a list goes on.")] = None,
    output: OutputOption = None,
) -> None:
    """Show one workflow, or list them."""
    kind = output_of(context, output)
    with client_of(context, BRIEF) as airs:
        if workflow_id is not None:
            workflow = airs.workflows.get(workflow_id)
            _show_workflow(workflow, kind, _spread(airs, workflow_id))
            return
        page = airs.workflows.list(state=state.upper() if state else None, cursor=cursor)
    if kind is Output.json:
        show_json(page.raw)
        return
    data(rendering.workflow_table(page.items))
    if page.next:
        talk(f"More: airs status --cursor {page.next}")


@app.command()
def results(
    context: typer.Context,
    workflow_id: WorkflowId,
    result_format: Annotated[
        Results, typer.Option("--format", help="jsonl has all fields of a record.")
    ] = Results.jsonl,
    destination: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write there instead of stdout."),
    ] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Only requests in it: COMPLETED, FAILED …")
    ] = None,
) -> None:
    """Fetch the ratings, one record a request in input order; works while they are made.

    A FILE appears when it is complete. `-o json` means JSON Lines on stdout, as elsewhere.
    """
    if destination == "json":
        if result_format is not Results.jsonl:
            raise typer.BadParameter(
                f"-o json and --format {result_format.value}; a file named json is ./json"
            )
        destination = None
    path = None if destination in (None, "-") else _writable(Path(str(destination)))
    with client_of(context, _SENDING) as airs:
        workflow = airs.workflows.get(workflow_id)
        stdout = typer.get_binary_stream("stdout")
        with nullcontext(stdout) if path is None else whole_file(path) as file:
            lines = _fetch(airs, workflow_id, result_format, state, file)
            file.flush()
    if not workflow.finished:
        talk(f"{workflow_id} has not ended: {rendering.progress_line(workflow)}")
    elif result_format is Results.jsonl and not state and lines != workflow.counts.total:
        talk(f"error: {lines:,} records came for {workflow.counts.total:,} requests")
        raise typer.Exit(FAILED)


@app.command()
def cancel(context: typer.Context, workflow_id: WorkflowId, output: OutputOption = None) -> None:
    """End a workflow; what is rated stays."""
    _act(context, output, lambda airs: airs.workflows.cancel(workflow_id))


@app.command()
def pause(context: typer.Context, workflow_id: WorkflowId, output: OutputOption = None) -> None:
    """Send nothing more of a workflow until it is resumed; its deadline goes on."""
    _act(context, output, lambda airs: airs.workflows.pause(workflow_id))


@app.command()
def resume(context: typer.Context, workflow_id: WorkflowId, output: OutputOption = None) -> None:
    """Send of a paused workflow again."""
    _act(context, output, lambda airs: airs.workflows.resume(workflow_id))


@app.command()
def complete(context: typer.Context, workflow_id: WorkflowId, output: OutputOption = None) -> None:
    """End a workflow as what its requests say; those that are open are not awaited."""
    _act(context, output, lambda airs: airs.workflows.complete(workflow_id))


@app.command()
def retry(context: typer.Context, workflow_id: WorkflowId, output: OutputOption = None) -> None:
    """Rate in a new round what did not complete, with a fresh deadline."""
    _act(context, output, lambda airs: airs.workflows.retry(workflow_id))


@app.command()
def change(
    context: typer.Context,
    workflow_id: WorkflowId,
    name: Annotated[str | None, typer.Option("--name")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=0, max=100, help="Larger is more urgent.")
    ] = None,
    deadline: Annotated[
        timedelta | None,
        typer.Option(
            "--deadline",
            parser=lambda text: _deadline(text),
            metavar="DURATION",
            help="Counted from when the round was accepted: 2h, 90m, 1h30m …",
        ),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Change name, priority or deadline of a workflow; what waits goes by it at once."""
    changed = _act(
        context,
        output,
        lambda airs: airs.workflows.change(
            workflow_id, name=name, priority=priority, deadline=deadline
        ),
    )
    if priority is not None and changed.priority_clipped:
        talk(rendering.printable(changed.priority_reason))


@raters_app.command("list")
def list_raters(context: typer.Context, output: OutputOption = None) -> None:
    """List the raters."""
    with client_of(context, BRIEF) as airs:
        page = airs.raters.list()
    rows = [(rater.id, rater.autorater, rater.model, rater.mode) for rater in page.items]
    show_list(context, output, page, ("ID", "AUTORATER", "MODEL", "MODE"), rows)


@raters_app.command("show")
def show_rater(context: typer.Context, rater_id: RaterId, output: OutputOption = None) -> None:
    """Show one rater."""
    with client_of(context, BRIEF) as airs:
        show_raw(airs.raters.get(rater_id).raw, output_of(context, output))


def _show_version(wanted: bool) -> None:
    if wanted:
        data(f"airs {version('airs-client')}")
        raise typer.Exit


def _act(
    context: typer.Context, output: Output | None, act: Callable[[Client], Workflow]
) -> Workflow:
    with client_of(context, BRIEF) as airs:
        workflow = act(airs)
    show_line(context, output, workflow.raw, f"{workflow.id} {workflow.state}")
    return workflow


def _follow(context: typer.Context, workflow_id: str) -> Workflow:
    display = display_on(Console(stderr=True), clock=time.monotonic)
    try:
        with client_of(context, _WATCHING, display.say) as airs, display:
            return airs.workflows.wait(workflow_id, on_progress=display.show)
    except KeyboardInterrupt:
        talk(
            f"Not watching any more; the workflow goes on.\n"
            f"Come back with: airs watch {workflow_id}\n"
            f"End it with:    airs cancel {workflow_id}"
        )
        raise typer.Exit(INTERRUPTED) from None


def _submit_code(sent: Submission, ended: Workflow | None) -> int:
    code = _ending_code(ended) if ended else 0
    return PARTIAL if code == 0 and sent.rejected else code


def _ending_code(workflow: Workflow) -> int:
    return {"COMPLETED": 0, "PARTIAL": PARTIAL}.get(workflow.state, FAILED)


def _deadline(text: str) -> timedelta:
    try:
        return duration_from(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _writable(path: Path) -> Path:
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise typer.BadParameter(f"{path} is a directory, or its directory does not exist")
    return path


def _fetch(
    airs: Client, workflow_id: str, wanted: Results, state: str | None, file: IO[bytes]
) -> int | None:
    """Write all records to a file; how many, where they can be counted."""
    state = state.upper() if state else None
    if wanted is Results.parquet:
        airs.workflows.download(workflow_id, file, format="parquet", state=state)
        return None
    lines = 0
    for page in airs.workflows.rating_pages(
        workflow_id, format="csv" if wanted is Results.csv else "jsonl", state=state
    ):
        file.write(page.content)
        lines += page.content.count(b"\n")
    return lines


def _spread(airs: Client, workflow_id: str) -> Distributions | None:
    """How its requests are spread; a server of another age may not tell."""
    try:
        return airs.workflows.distributions(workflow_id)
    except NotFound:
        return None


def _show_workflow(
    workflow: Workflow, kind: Output, distributions: Distributions | None = None
) -> None:
    if kind is Output.json:
        show_json(
            {**workflow.raw, **({"distributions": distributions.raw} if distributions else {})}
        )
        return
    data(rendering.workflow_block(workflow))
    if distributions and (block := rendering.distributions_block(distributions)):
        data(f"\n{block}")
