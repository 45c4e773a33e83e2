"""`airs pools`: devices, and the replicas that move between models on them."""

from enum import StrEnum
from typing import Annotated

import typer

from airs_client import rendering
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
from airs_client.results import Pool

pools_app = typer.Typer(
    help="Devices, and replicas that move between models.", no_args_is_help=True
)


class Mode(StrEnum):
    off = "off"
    dry_run = "dry_run"
    on = "on"


class DeviceKind(StrEnum):
    cpu = "cpu"
    gpu = "gpu"
    tpu = "tpu"


PoolId = Annotated[str, typer.Argument(metavar="ID", help="Id of a pool.")]


@pools_app.command("list")
def list_pools(context: typer.Context, output: OutputOption = None) -> None:
    """List the pools, with what the rebalancer last found."""
    with client_of(context, BRIEF) as airs:
        page = airs.pools.list()
    headers = ("ID", "KIND", "DEVICES USED", "REBALANCING", "FOUND")
    rows = [
        (pool.id, pool.kind, f"{pool.devices_used} of {pool.devices}", pool.rebalancing, pool.found)
        for pool in page.items
    ]
    show_list(context, output, page, headers, rows)


@pools_app.command("show")
def show_pool(context: typer.Context, pool_id: PoolId, output: OutputOption = None) -> None:
    """Show one pool."""
    with client_of(context, BRIEF) as airs:
        show_raw(airs.pools.get(pool_id).raw, output_of(context, output))


@pools_app.command("decisions")
def list_decisions(
    context: typer.Context,
    pool_id: PoolId,
    cursor: Annotated[str | None, typer.Option("--cursor", help="Where a list goes on.")] = None,
    output: OutputOption = None,
) -> None:
    """List what the rebalancer decided, the newest first; (moves) were only thought of."""
    with client_of(context, BRIEF) as airs:
        page = airs.pools.decisions(pool_id, cursor=cursor)
    if output_of(context, output) is Output.json:
        show_json(page.raw)
        return
    data(rendering.decision_table(page.items))
    if page.next:
        talk(f"More: airs pools decisions {pool_id} --cursor {page.next}")


@pools_app.command("rebalance")
def rebalance(
    context: typer.Context,
    pool_id: PoolId,
    mode: Annotated[Mode, typer.Argument(help="dry_run only says what would move.")],
    output: OutputOption = None,
) -> None:
    """Let replicas move between the pool's models, or no more."""
    with client_of(context, BRIEF) as airs:
        pool = airs.pools.rebalance(pool_id, mode.value)
    show_line(context, output, pool.raw, f"{pool.id} {pool.rebalancing}")


@pools_app.command("register")
def register_pool(
    context: typer.Context,
    pool_id: PoolId,
    devices: Annotated[int, typer.Option("--devices", min=1, help="How many it has.")],
    kind: Annotated[DeviceKind, typer.Option("--kind", help="What they are.")] = DeviceKind.cpu,
    agent: Annotated[
        str, typer.Option("--agent", help="Name of the host agent that runs its servers.")
    ] = "local",
    output: OutputOption = None,
) -> None:
    """Register a pool of devices."""
    with client_of(context, BRIEF) as airs:
        pool = airs.pools.register(pool_id, devices=devices, kind=kind.value, agent=agent)
    _show_pool(context, output, pool)


@pools_app.command("resize")
def resize_pool(
    context: typer.Context,
    pool_id: PoolId,
    devices: Annotated[int, typer.Argument(min=1, metavar="DEVICES")],
    output: OutputOption = None,
) -> None:
    """Change how many devices a pool has; it keeps those that started models use."""
    with client_of(context, BRIEF) as airs:
        pool = airs.pools.change(pool_id, devices=devices)
    _show_pool(context, output, pool)


@pools_app.command("remove")
def remove_pool(context: typer.Context, pool_id: PoolId) -> None:
    """Remove a pool that no model belongs to."""
    with client_of(context, BRIEF) as airs:
        airs.pools.remove(pool_id)
    talk(rendering.printable(f"{pool_id} is removed."))


def _show_pool(context: typer.Context, output: Output | None, pool: Pool) -> None:
    line = f"{pool.id} {pool.devices_used} of {pool.devices} devices used"
    show_line(context, output, pool.raw, line)
