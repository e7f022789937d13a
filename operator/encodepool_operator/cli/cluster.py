"""``encodepool status`` and ``encodepool plan``: pools of a cluster, seen through the API server."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from encodepool_operator.local.errors import ManifestError

# Commands import what they need when they run, so that --help and completion are quick.

Result = TypeVar("Result")

NAMESPACE = click.option(
    "-n", "--namespace", default="", metavar="N", help="Namespace; default: that of the kubeconfig's context."
)
CONTEXT = click.option(
    "--context", default=None, metavar="NAME", help="Context of the kubeconfig; default: the current one."
)


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work``; what the API server or the credentials refuse becomes a one-line error."""
    from encodepool_operator.kube.errors import KubeError

    try:
        return asyncio.run(work)
    except KubeError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.argument("name", required=False)
@NAMESPACE
@CONTEXT
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Pools of all namespaces.")
@click.option("-w", "--watch", is_flag=True, help="Go on and show changes until interrupted.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "smg"]),
    default="table",
    show_default=True,
    help="smg prints the flags that make the SMG gateway use the pool, for each way of finding it.",
)
def status(
    name: str | None, namespace: str, context: str | None, everywhere: bool, watch: bool, output: str
) -> None:
    """Show the pools of a cluster, or one pool with its conditions and groups."""
    from encodepool_operator.cli import cluster_view
    from encodepool_operator.controller.look import Where, follow_pools, read_documents, read_pools
    from encodepool_operator.core.endpoints import SMG_ARGS

    if name is not None and everywhere:
        raise click.UsageError("a NAME is looked for in one namespace: leave out --all-namespaces")
    if watch and output != "table":
        raise click.UsageError("--watch shows a table: leave out --output")
    where = Where(namespace, context, everywhere, name or "")
    if watch:
        with cluster_view.LiveTable(detailed=name is not None) as view:
            run_async(follow_pools(where, view.show, view.trouble))
        return
    pools = run_async(read_pools(where))
    if name is not None and not pools:
        raise click.ClickException(f"there is no EncodePool {name} here; `encodepool status -A` lists all")
    if output == "json":
        click.echo(json.dumps(pools[0] if name is not None else {"items": pools}, indent=1))
    elif output == "smg":
        known = [f"{pool['metadata']['namespace']}/{pool['metadata']['name']}" for pool in pools]
        tokens = run_async(read_documents(where, known, SMG_ARGS))
        for pool, listed in zip(known, tokens, strict=True):
            cluster_view.print_gateway_flags(pool, listed or "")
    else:
        cluster_view.print_table(pools, detailed=name is not None)


@click.command()
@click.option(
    "-f",
    "--file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Manifest of the pool as it is to be.",
)
@NAMESPACE
@CONTEXT
@click.option(
    "--default-worker-image",
    default="",
    metavar="I",
    help="What the operator was started with, for pools that name no image.",
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def plan(file: Path, namespace: str, context: str | None, default_worker_image: str, output: str) -> None:
    """Show what the operator would do next if FILE were applied now, and why. Nothing is written.

    It is the next step: further ones follow when what it does has had its effect, and wait for it.
    """
    from encodepool_operator.api.parse import InvalidPool
    from encodepool_operator.cli import cluster_view
    from encodepool_operator.controller.look import Where, plan_for
    from encodepool_operator.local.manifest import load_document

    document, where = load_document(file), Where(namespace, context)
    try:
        steps = run_async(plan_for(where, document, default_image=default_worker_image))
    except InvalidPool as error:
        problems = [f"{file}: {problem}" for problem in error.problems]
        raise ManifestError(problems[0], tuple(problems[1:])) from error
    if output == "json":
        click.echo(json.dumps(steps, indent=1))
    else:
        cluster_view.print_plan(steps)
