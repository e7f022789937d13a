"""``encodepool encode --pool``: the published list of a pool of a cluster, as the file that clients read.

The command itself belongs to the worker's package and knows only ``--endpoints FILE``. Here it gets one
more option, which fetches the pool's ConfigMap into a file and passes that on.
"""

import tempfile
from pathlib import Path
from typing import Any

import click

from encodepool_operator.api.names import name_problem

LIST = "endpoints.json"


def check_pools(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
    """Callback of options ``--pool``, whether they may be repeated or not."""
    for pool in given if isinstance(given, tuple) else (given,) if given is not None else ():
        namespace, slash, name = pool.rpartition("/")
        if (slash and not namespace) or "/" in namespace:
            raise click.BadParameter(f"{pool!r} is neither NAME nor NAMESPACE/NAME")
        if problem := name_problem(name):
            raise click.BadParameter(f"{pool!r}: a pool's name {problem}")
    return given


def with_pool_option(command: click.Command) -> click.Command:
    """``command`` with ``--pool``; as it is if it takes no ``--endpoints`` (it could not be imported)."""
    if not any("--endpoints" in parameter.opts for parameter in command.params):
        return command
    inner = command.callback
    assert inner is not None

    def run(**given: Any) -> Any:
        pool, context = given.pop("pool"), given.pop("context")
        if pool is None:
            return inner(**given)
        for other, option in (("endpoints", "--endpoints"), ("url", "--endpoint")):
            if given.get(other) is not None:
                raise click.UsageError(f"--pool and {option} both say where to send: leave one out")
        with tempfile.TemporaryDirectory(prefix="encodepool-") as folder:
            file = Path(folder) / LIST
            file.write_text(published_list(pool, context), encoding="utf-8")
            return inner(**given | {"endpoints": file})

    extra = [
        click.Option(
            ["--pool"],
            callback=check_pools,
            metavar="[NS/]NAME",
            help="A pool of the cluster instead of a file.",
        ),
        click.Option(["--context"], metavar="NAME", help="With --pool: context of the kubeconfig."),
    ]
    return click.Command(
        name=command.name,
        callback=run,
        params=[*command.params, *extra],
        help=command.help,
        epilog=command.epilog,
        short_help=command.short_help,
        context_settings=command.context_settings,
    )


def published_list(pool: str, context: str | None) -> str:
    """The text of the list. Raises click.ClickException."""
    from encodepool_operator.controller.look import Where, read_documents
    from encodepool_operator.core.endpoints import ENDPOINTS

    from .cluster import run_async

    (text,) = run_async(read_documents(Where(context=context), [pool], ENDPOINTS))
    if text is None:
        name = pool.rpartition("/")[2]
        raise click.ClickException(f"pool {pool} has published no list; see `encodepool status {name}`")
    return text
