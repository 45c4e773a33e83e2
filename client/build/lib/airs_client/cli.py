"""The `airs` command: data on standard output, talk on standard error.

Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 finished with failed or refused items,
130 interrupted. Nothing here decides how a call is made; see `client`.
"""

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console

from airs_client import rendering
from airs_client.client import Client
from airs_client.connection import InvalidSettings
from airs_client.displays import display_on
from airs_client.durations import duration_from
from airs_client.errors import AirsError, SourceUnreadable, UnusableId
from airs_client.files import whole_file
from airs_client.results import Page, RatingsPage, Submission, Workflow
from airs_client.retries import Retries


class Output(StrEnum):
    text = "text"
    json = "json"


class Results(StrEnum):
    jsonl = "jsonl"
    csv = "csv"


class RowFormat(StrEnum):
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Globals:
    url: str | None
    profile: str | None
    output: Output


FAILED, USAGE, PARTIAL, INTERRUPTED = 1, 2, 3, 130

_BRIEF = Retries(max_retries=3)
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
models_app = typer.Typer(help="The models that raters call.", no_args_is_help=True)
app.add_typer(raters_app, name="raters")
app.add_typer(models_app, name="models")

OutputOption = Annotated[
    Output | None, typer.Option("--output", "-o", help="text for people, or json.")
]
WorkflowId = Annotated[str, typer.Argument(metavar="ID", help="Id of a workflow.")]
RaterId = Annotated[str, typer.Argument(metavar="ID", help="Id of a rater.")]
ModelId = Annotated[str, typer.Argument(metavar="ID", help="Id of a model.")]


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
        _talk(rendering.problem(error))
        return USAGE
    except AirsError as error:
        _talk(rendering.problem(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the outermost step: whatever it is, a person reads it
        _talk(f"error: unexpected {type(error).__name__}: {rendering.printable(str(error))}")
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
    row_format: Annotated[
        RowFormat | None, typer.Option("--format", help="Default: by the file's name.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Send a file of rows to be rated; prints the workflow's id.

    The same file with the same options is one workflow, however often it is sent.
    """
    with _client(context, _SENDING) as airs:
        try:
            sent = airs.workflows.submit(
                sys.stdin.buffer if file == "-" else Path(file),
                rater=rater,
                name=name or ("stdin" if file == "-" else None),
                priority=priority,
                deadline=deadline,
                bypass=bypass,
                format=row_format.value if row_format else None,
                idempotency_key=f"airs-{uuid.uuid4().hex}" if again else None,
            )
        except KeyboardInterrupt:
            _talk("Interrupted. All of the file was taken or nothing; sending it again is safe.")
            raise typer.Exit(INTERRUPTED) from None
    as_json = _output(context, output) is Output.json
    _talk(rendering.submission(sent))
    if not as_json:
        _data(sent.workflow.id)
    if not wait:
        _talk(f"Follow it with: airs watch {sent.workflow.id}")
    ended = _follow(context, sent.workflow.id) if wait else None
    if as_json:
        _json({**sent.raw, **ended.raw} if ended else sent.raw)
    raise typer.Exit(_submit_code(sent, ended))


@app.command()
def watch(context: typer.Context, workflow_id: WorkflowId, output: OutputOption = None) -> None:
    """Show a workflow's progress until it ends. Ctrl-C stops watching, not the workflow."""
    workflow = _follow(context, workflow_id)
    _show_workflow(workflow, _output(context, output))
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
    kind = _output(context, output)
    with _client(context, _BRIEF) as airs:
        if workflow_id is not None:
            _show_workflow(airs.workflows.get(workflow_id), kind)
            return
        page = airs.workflows.list(state=state.upper() if state else None, cursor=cursor)
    if kind is Output.json:
        _json(page.raw)
        return
    _data(rendering.workflow_table(page.items))
    if page.next:
        _talk(f"More: airs status --cursor {page.next}")


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
            raise typer.BadParameter("-o json and --format csv; a file named json is ./json")
        destination = None
    path = None if destination in (None, "-") else _writable(Path(str(destination)))
    with _client(context, _SENDING) as airs:
        workflow = airs.workflows.get(workflow_id)
        pages = airs.workflows.rating_pages(
            workflow_id, format=result_format.value, state=state.upper() if state else None
        )
        if path is None:
            lines = _write(pages, typer.get_binary_stream("stdout"))
        else:
            with whole_file(path) as file:
                lines = _write(pages, file)
    if not workflow.finished:
        _talk(f"{workflow_id} has not ended: {rendering.progress_line(workflow)}")
    elif result_format is Results.jsonl and not state and lines != workflow.counts.total:
        _talk(f"error: {lines:,} records came for {workflow.counts.total:,} requests")
        raise typer.Exit(FAILED)


@app.command()
def cancel(context: typer.Context, workflow_id: WorkflowId, output: OutputOption = None) -> None:
    """End a workflow; what is rated stays."""
    with _client(context, _BRIEF) as airs:
        workflow = airs.workflows.cancel(workflow_id)
    if _output(context, output) is Output.json:
        _json(workflow.raw)
    else:
        _data(rendering.printable(f"{workflow_id} {workflow.state}"))


@raters_app.command("list")
def list_raters(context: typer.Context, output: OutputOption = None) -> None:
    """List the raters."""
    with _client(context, _BRIEF) as airs:
        page = airs.raters.list()
    rows = [(rater.id, rater.autorater, rater.model, rater.mode) for rater in page.items]
    _show_list(context, output, page, ("ID", "AUTORATER", "MODEL", "MODE"), rows)


@raters_app.command("show")
def show_rater(context: typer.Context, rater_id: RaterId, output: OutputOption = None) -> None:
    """Show one rater."""
    with _client(context, _BRIEF) as airs:
        _show_raw(airs.raters.get(rater_id).raw, _output(context, output))


@models_app.command("list")
def list_models(context: typer.Context, output: OutputOption = None) -> None:
    """List the models."""
    with _client(context, _BRIEF) as airs:
        page = airs.models.list()
    rows = [(model.id, model.kind, model.protocol, model.state) for model in page.items]
    _show_list(context, output, page, ("ID", "KIND", "PROTOCOL", "STATE"), rows)


@models_app.command("show")
def show_model(context: typer.Context, model_id: ModelId, output: OutputOption = None) -> None:
    """Show one model."""
    with _client(context, _BRIEF) as airs:
        _show_raw(airs.models.get(model_id).raw, _output(context, output))


def _show_version(wanted: bool) -> None:
    if wanted:
        _data(f"airs {version('airs-client')}")
        raise typer.Exit


@contextmanager
def _client(
    context: typer.Context, retries: Retries, say: Callable[[str], None] | None = None
) -> Iterator[Client]:
    wanted: Globals = context.obj
    say = say or _talk
    with Client(
        wanted.url,
        profile=wanted.profile,
        retries=retries,
        on_retry=lambda failure, delay_s: say(
            rendering.printable(f"{failure}; trying again in {delay_s:.1f} s")
        ),
    ) as airs:
        yield airs


def _follow(context: typer.Context, workflow_id: str) -> Workflow:
    display = display_on(Console(stderr=True), clock=time.monotonic)
    try:
        with _client(context, _WATCHING, display.say) as airs, display:
            return airs.workflows.wait(workflow_id, on_progress=display.show)
    except KeyboardInterrupt:
        _talk(
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


def _write(pages: Iterable[RatingsPage], file: IO[bytes]) -> int:
    lines = 0
    for page in pages:
        file.write(page.content)
        lines += page.content.count(b"\n")
    file.flush()
    return lines


def _output(context: typer.Context, output: Output | None) -> Output:
    wanted: Globals = context.obj
    return output or wanted.output


def _show_workflow(workflow: Workflow, kind: Output) -> None:
    if kind is Output.json:
        _json(workflow.raw)
    else:
        _data(rendering.workflow_block(workflow))


def _show_list(
    context: typer.Context,
    output: Output | None,
    page: Page[Any],
    headers: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
) -> None:
    if _output(context, output) is Output.json:
        _json(page.raw)
        return
    _data(rendering.table(headers, rows))
    if page.next:
        _talk("There are more; the API gives them by cursor.")


def _show_raw(raw: Any, kind: Output) -> None:
    if kind is Output.json:
        _json(raw)
    else:
        _data(rendering.fields(raw))


def _json(value: Any) -> None:
    _data(json.dumps(value, ensure_ascii=False, indent=2))


def _data(text: str) -> None:
    typer.echo(text)


def _talk(text: str) -> None:
    typer.echo(text, err=True)
