"""`airs models`: what serves raters."""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from airs_client import rendering
from airs_client.client import Client
from airs_client.commands import (
    BRIEF,
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
from airs_client.results import Model

models_app = typer.Typer(help="The models that raters call.", no_args_is_help=True)


class Protocol(StrEnum):
    oip = "oip"
    openai = "openai"


class ScoringBy(StrEnum):
    chat = "chat"
    score = "score"
    rerank = "rerank"
    tei_rerank = "tei_rerank"
    embeddings = "embeddings"


ModelId = Annotated[str, typer.Argument(metavar="ID", help="Id of a model.")]


@models_app.command("list")
def list_models(context: typer.Context, output: OutputOption = None) -> None:
    """List the models."""
    with client_of(context, BRIEF) as airs:
        page = airs.models.list()
    rows = [(model.id, model.kind, model.protocol, model.state) for model in page.items]
    show_list(context, output, page, ("ID", "KIND", "PROTOCOL", "STATE"), rows)


@models_app.command("show")
def show_model(context: typer.Context, model_id: ModelId, output: OutputOption = None) -> None:
    """Show one model."""
    with client_of(context, BRIEF) as airs:
        show_raw(airs.models.get(model_id).raw, output_of(context, output))


@models_app.command("register")
def register_model(
    context: typer.Context,
    model_id: ModelId,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            help="AIRS serves it: pkg:PACKAGE/PATH, or a path under the server's checkpoint root.",
        ),
    ] = None,
    loader: Annotated[str | None, typer.Option("--loader", help="Its architecture.")] = None,
    pool: Annotated[str | None, typer.Option("--pool", help="Id of a pool.")] = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="Of one replica.")] = None,
    replicas: Annotated[
        str | None, typer.Option("--replicas", metavar="MIN:DEFAULT:MAX", help="As 0:1:4.")
    ] = None,
    serving: Annotated[
        str | None, typer.Option("--serving", metavar="JSON", help="Options of the model server.")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="It is served there already.")
    ] = None,
    protocol: Annotated[
        Protocol | None, typer.Option("--protocol", help="What its server speaks.")
    ] = None,
    endpoint: Annotated[
        ScoringBy | None,
        typer.Option("--endpoint", help="By which an openai server scores query and text."),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="What its server calls it.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="env:NAME|-", help="A variable of AIRS, or - for stdin."),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, help="Calls its server may hold.")
    ] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Of a call, in s.")] = None,
    output: OutputOption = None,
) -> None:
    """Register a model: hosted from a checkpoint, or external at a URL. Start it afterwards."""
    if (checkpoint is None) == (address is None):
        raise typer.BadParameter("either --checkpoint (hosted) or --server (external)")
    given = {
        "kind": "hosted" if address is None else "external",
        "checkpoint": checkpoint,
        "loader": loader,
        "pool": pool,
        "devices_per_replica": devices,
        "replicas": _bounds(replicas),
        "serving": _object(serving),
        "url": address,
        "protocol": protocol.value if protocol else None,
        "endpoint": endpoint.value if endpoint else None,
        "model_name": model_name,
        "api_key": _key(key),
        "max_concurrency": max_concurrency,
        "timeout_s": timeout_s,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    _show_model(context, output, lambda airs: airs.models.register(model_id, **settings))


@models_app.command("start")
def start_model(context: typer.Context, model_id: ModelId, output: OutputOption = None) -> None:
    """Want the model's replicas; they come within seconds."""
    _show_model(context, output, lambda airs: airs.models.start(model_id))


@models_app.command("stop")
def stop_model(context: typer.Context, model_id: ModelId, output: OutputOption = None) -> None:
    """Drain and end the model's replicas."""
    _show_model(context, output, lambda airs: airs.models.stop(model_id))


@models_app.command("restart")
def restart_model(context: typer.Context, model_id: ModelId, output: OutputOption = None) -> None:
    """Replace the model's replicas, one at a time while others serve."""
    _show_model(context, output, lambda airs: airs.models.restart(model_id))


@models_app.command("resize")
def resize_model(
    context: typer.Context,
    model_id: ModelId,
    replicas: Annotated[int, typer.Argument(min=0, metavar="REPLICAS")],
    output: OutputOption = None,
) -> None:
    """Want another number of replicas; the rebalancer leaves them alone for an hour."""
    _show_model(context, output, lambda airs: airs.models.resize(model_id, replicas))


@models_app.command("remove")
def remove_model(context: typer.Context, model_id: ModelId) -> None:
    """Remove a model that is not started."""
    with client_of(context, BRIEF) as airs:
        airs.models.remove(model_id)
    talk(rendering.printable(f"{model_id} is removed."))


@models_app.command("versions")
def list_versions(context: typer.Context, model_id: ModelId, output: OutputOption = None) -> None:
    """List the versions of a model, the newest first."""
    with client_of(context, BRIEF) as airs:
        page = airs.models.versions(model_id)
    headers = ("VERSION", "STATE", "CHECKPOINT", "WHY")
    names = ("version", "state", "checkpoint", "reason")
    rows = [tuple(str(version.get(name) or "") for name in names) for version in page.items]
    show_list(context, output, page, headers, rows)


@models_app.command("retire")
def retire_version(
    context: typer.Context,
    model_id: ModelId,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="See `models versions`.")],
    output: OutputOption = None,
) -> None:
    """End an old version's replicas, whatever work waits for it."""
    with client_of(context, BRIEF) as airs:
        retired = airs.models.retire(model_id, version)
    show_line(context, output, retired, f"{model_id} {version} {retired.get('state')}")


@models_app.command("try")
def try_model(
    context: typer.Context,
    model_id: ModelId,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Results to the query.")
    ] = None,
    query: Annotated[str | None, typer.Option("--query", help="Of an OIP model.")] = None,
    message: Annotated[str | None, typer.Option("--message", help="For a chat model.")] = None,
    output: OutputOption = None,
) -> None:
    """Ask a model once, as executors do; nothing is archived."""
    if (query is None) == (message is None) or bool(texts) != (query is not None):
        raise typer.BadParameter("either --query with texts, or --message")
    with client_of(context, BRIEF) as airs:
        if message is not None:
            tried = airs.models.try_message(model_id, message)
        else:
            tried = airs.models.try_rows(model_id, [(str(query), text) for text in texts or ()])
    if output_of(context, output) is Output.json:
        show_json(tried)
    elif not tried.get("error"):
        data(rendering.trial(tried, texts or ()))
    if error := tried.get("error"):
        talk(rendering.printable(f"error: {error.get('code')}: {error.get('detail')}"))
        raise typer.Exit(1)


def _show_model(
    context: typer.Context, output: Output | None, act: Callable[[Client], Model]
) -> None:
    with client_of(context, BRIEF) as airs:
        model = act(airs)
    show_line(context, output, model.raw, f"{model.id} {model.state or model.kind}")
    for warning in model.raw.get("warnings") or ():
        talk(rendering.printable(f"warning: {warning}"))


def _bounds(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter("--replicas is MIN:DEFAULT:MAX, as 0:1:4")
    return dict(zip(("min", "default", "max"), map(int, parts), strict=True))


def _object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--serving is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter("--serving is no JSON object")
    return found


def _key(text: str | None) -> str | None:
    """Return the key; on the command line itself everybody on the machine could read it."""
    if text == "-":
        return sys.stdin.readline().rstrip("\r\n")
    if text is not None and not text.startswith("env:"):
        raise typer.BadParameter("--key is env:NAME, or - to read the key from stdin")
    return text
