"""The command ``encodepool``."""

import click

from .cluster import plan, status
from .endpoints import endpoints
from .errors import run_command
from .local import local
from .plugins import PluginGroup


@click.group(cls=PluginGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="encodepool", prog_name="encodepool")
@click.option("--debug", is_flag=True, help="Show where an error came from.")
def encodepool(debug: bool) -> None:
    """Pools of vision-encode workers for EPD serving of vision-language models.

    \b
    One machine, no Kubernetes:
      encodepool local up -f pool.yaml --state-dir ./pool
      encodepool encode cat.jpg --endpoints ./pool/endpoints/endpoints.json
      encodepool local down --state-dir ./pool
    A cluster:
      kubectl apply -f pool.yaml && encodepool status my-pool --watch
      encodepool encode cat.jpg --pool my-pool
    """


for command in (local, plan, status, endpoints):
    encodepool.add_command(command)


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv`` (the process's own if None); the exit code."""
    return run_command(encodepool, argv, "encodepool")
