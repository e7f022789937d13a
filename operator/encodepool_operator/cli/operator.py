"""The command ``encodepool-operator``."""

import click

from .cluster import run_async
from .errors import run_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="encodepool", prog_name="encodepool-operator")
@click.option("--debug", is_flag=True, help="Show where an error came from.")
def operator(debug: bool) -> None:
    """The Kubernetes operator of EncodePools."""


@operator.command()
@click.option(
    "--namespace",
    "-n",
    "namespaces",
    multiple=True,
    metavar="N",
    help="Watch only this namespace; may be repeated. Without it: all of the cluster.",
)
@click.option(
    "--default-worker-image",
    default="",
    metavar="I",
    help="Image of pools that name none. A pool keeps the one that it started with.",
)
@click.option(
    "--listen",
    default="0.0.0.0:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of /livez, /readyz and /metrics. Port 0: any free one, printed in the log.",
)
@click.option(
    "--lease-namespace",
    default="",
    metavar="N",
    help="Namespace of the Lease by which replicas agree. Default: the pod's own, or the kubeconfig's.",
)
@click.option(
    "--lease-name",
    default="encodepool-operator",
    show_default=True,
    metavar="NAME",
    help="Operators that watch different namespaces and keep their Lease in one need different names.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def run(
    namespaces: tuple[str, ...],
    default_worker_image: str,
    listen: str,
    lease_namespace: str,
    lease_name: str,
    log_level: str,
) -> int:
    """Run the operator until SIGTERM.

    Credentials are the pod's service account, or the kubeconfig (KUBECONFIG, else ~/.kube/config).
    """
    import logging

    from encodepool_operator.controller.run import Options, run_operator
    from encodepool_operator.local.logs import setup_logs

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter("must be HOST:PORT", param_hint="--listen")
    setup_logs(getattr(logging, log_level.upper()))
    options = Options(
        namespaces=namespaces,
        default_image=default_worker_image,
        host=host.strip("[]"),
        port=int(port),
        lease_namespace=lease_namespace,
        lease_name=lease_name,
    )
    return run_async(run_operator(options))


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv`` (the process's own if None); the exit code."""
    return run_command(operator, argv, "encodepool-operator")
