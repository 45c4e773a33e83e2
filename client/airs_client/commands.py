"""What the commands of `airs` share: the client that they call with, and how they print.

Data goes to standard output, talk to standard error.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from airs_client import rendering
from airs_client.client import Client
from airs_client.results import Page
from airs_client.retries import Retries


class Output(StrEnum):
    text = "text"
    json = "json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Globals:
    url: str | None
    profile: str | None
    output: Output


BRIEF = Retries(max_retries=3)

OutputOption = Annotated[
    Output | None, typer.Option("--output", "-o", help="text for people, or json.")
]


@contextmanager
def client_of(
    context: typer.Context, retries: Retries, say: Callable[[str], None] | None = None
) -> Iterator[Client]:
    wanted: Globals = context.obj
    say = say or talk
    with Client(
        wanted.url,
        profile=wanted.profile,
        retries=retries,
        on_retry=lambda failure, delay_s: say(
            rendering.printable(f"{failure}; trying again in {delay_s:.1f} s")
        ),
    ) as airs:
        yield airs


def output_of(context: typer.Context, output: Output | None) -> Output:
    wanted: Globals = context.obj
    return output or wanted.output


def show_list(
    context: typer.Context,
    output: Output | None,
    page: Page[Any],
    headers: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
) -> None:
    if output_of(context, output) is Output.json:
        show_json(page.raw)
        return
    data(rendering.table(headers, rows))
    if page.next:
        talk("There are more; the API gives them by cursor.")


def show_line(context: typer.Context, output: Output | None, raw: Any, line: str) -> None:
    if output_of(context, output) is Output.json:
        show_json(raw)
    else:
        data(rendering.printable(line))


def show_raw(raw: Any, kind: Output) -> None:
    if kind is Output.json:
        show_json(raw)
    else:
        data(rendering.fields(raw))


def show_json(value: Any) -> None:
    data(json.dumps(value, ensure_ascii=False, indent=2))


def data(text: str) -> None:
    typer.echo(text)


def talk(text: str) -> None:
    typer.echo(text, err=True)
