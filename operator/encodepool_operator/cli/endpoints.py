"""``encodepool endpoints``: published lists as the file that the SMG gateway reads."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from encodepool_operator.core.endpoints import WORKERS
from encodepool_operator.core.manifest import Worker
from encodepool_operator.local.errors import LocalError, ManifestError

from .pool_list import check_pools

# Commands import what they need when they run, so that --help and completion are quick.

WITH = click.option(
    "--with",
    "manifest",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="MANIFEST",
    help="SMG manifest with the prefill and decode workers. Its encode workers are left out.",
)


@click.group()
def endpoints() -> None:
    """Published lists as one file for the SMG gateway's file discovery."""


@endpoints.command()
@click.argument("lists", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@WITH
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Replaced in one step, so a gateway may be reading it. Default: standard output.",
)
def merge(lists: tuple[Path, ...], manifest: Path | None, out: Path | None) -> None:
    """Join LISTS of pools, and the prefill and decode workers of a manifest, into one manifest.

    Each of LISTS is the workers.json of a pool, or the state directory of a local one. Everything is
    checked first: if one file cannot be used, nothing is written.
    """
    from encodepool_operator.core import manifest as manifests
    from encodepool_operator.local.statedir import StateDir, write_atomic

    files = [StateDir.at(path).endpoints / WORKERS if path.is_dir() else path for path in lists]
    if out is not None:
        _check_out(out, files)
    read = [(str(file), _checked(file, manifests.read_list)) for file in files]
    base = () if manifest is None else _checked(manifest, manifests.read_manifest)
    try:
        merged = manifests.merge(base, read)
    except manifests.ManifestProblems as error:
        raise ManifestError(error.problems[0], error.problems[1:]) from error
    for note in merged.notes:
        click.echo(f"note: {note}", err=True)
    if out is None:
        click.echo(merged.text, nl=False)
        return
    try:
        write_atomic(out, merged.text)
    except OSError as error:
        raise LocalError(f"cannot write {out}: {error.strerror}") from error


@endpoints.command()
@click.option(
    "--pool",
    "pools",
    multiple=True,
    callback=check_pools,
    metavar="[NS/]NAME",
    help="A pool of the cluster; may be repeated.",
)
@click.option(
    "--state-dir",
    "state_dirs",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="A pool of this machine; may be repeated.",
)
@WITH
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file to keep; its folder must exist.",
)
@click.option(
    "--health-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Is there, and touched every few seconds, as long as the file is in step.",
)
@click.option("--context", default=None, metavar="NAME", help="Context of the kubeconfig; default: current.")
def follow(
    pools: tuple[str, ...],
    state_dirs: tuple[Path, ...],
    manifest: Path | None,
    out: Path,
    health_file: Path | None,
    context: str | None,
) -> int:
    """Keep FILE in step with pools, and with the manifest of the prefill and decode workers.

    Runs until SIGTERM. Nothing is written before every list has been read once; what cannot be read or
    used later leaves the last good state in force. Of the API server it needs list and watch on the
    ConfigMaps NAME-endpoints.
    """
    import asyncio

    from encodepool_operator.kube.errors import KubeError
    from encodepool_operator.local.logs import setup_logs
    from encodepool_operator.local.statedir import StateDir

    from .follow import Sources
    from .follow import follow as run

    if not pools and not state_dirs:
        raise click.UsageError("name at least one --pool or --state-dir")
    if manifest is not None and manifest.resolve() == out.resolve():
        raise click.UsageError("--with and --out name the same file")
    _check_out(out, (StateDir.at(folder).endpoints for folder in state_dirs))
    setup_logs()
    try:
        return asyncio.run(run(Sources(pools, state_dirs, manifest, context), out, health_file))
    except KubeError as error:
        raise click.ClickException(f"{error}; it needs list and watch on the lists' ConfigMaps") from error


def _check_out(out: Path, read: Iterable[Path]) -> None:
    """What is read, and what a local pool keeps, is not ours to write. Raises click.UsageError."""
    from encodepool_operator.local.statedir import StateDir

    place = out.resolve()
    own = any(StateDir(folder).owns(place) for folder in place.parents[:2])
    if own or any(place.is_relative_to(one.resolve()) for one in read):
        raise click.UsageError("--out names a file that is read, or of a pool's own: choose another place")


def _checked(path: Path, read: Callable[[str], Sequence[Worker]]) -> Sequence[Worker]:
    """Raises ManifestError with every problem of the file."""
    from encodepool_operator.core.manifest import ManifestProblems

    try:
        return read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path} is not UTF-8 text") from error
    except ManifestProblems as error:
        first, *others = (f"{path}: {problem}" for problem in error.problems)
        raise ManifestError(first, tuple(others)) from error
