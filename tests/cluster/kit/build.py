"""Gets the programs that are missing: Go modules are built into the cache, Debian packages installed.

The versions are pinned in ``tools/*/go.mod`` with their checksums in ``go.sum``.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.kit.programs import (
    CNI_FOLDERS,
    PROGRAMS,
    Program,
    ProgramMissing,
    bin_folder,
    find,
    find_cni,
    go,
    missing_packages,
    missing_programs,
)

TOOLS = Path(__file__).resolve().parent.parent / "tools"
REPORT_EVERY_S = 15.0
Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    print(f"cluster: {line}", file=sys.stderr, flush=True)


def get_missing(*, nodes: bool, also: tuple[str, ...] = (), say: Say = say_on_stderr) -> None:
    """Build and install whatever a cluster needs and this machine lacks.

    ``also`` names further programs of ``PROGRAMS``. Takes as long as these say when nothing is there
    yet, and no time when everything is. Raises ProgramMissing.
    """
    _install_packages(missing_packages(nodes=nodes), say)
    wanted = missing_programs(nodes=nodes)
    wanted += [PROGRAMS[name] for name in also if find(name) is None]
    if not wanted:
        return
    if go() is None:
        names = ", ".join(program.name for program in wanted)
        raise ProgramMissing(f"{names} must be built, and there is no Go: install Go 1.26 or newer")
    with _one_at_a_time(say):
        minutes = sum(program.build_s for program in wanted) / 60
        say(f"{len(wanted)} programs to build, about {minutes:.0f} minutes on two cores, once")
        for number, program in enumerate(wanted, 1):
            if find(program.name) is None:
                _build(program, f"{number}/{len(wanted)}", say)


@contextmanager
def _one_at_a_time(say: Say) -> Iterator[None]:
    """Two runs must not build the same programs side by side."""
    bin_folder().mkdir(parents=True, exist_ok=True)
    with (bin_folder() / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is building; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(program: Program, place: str, say: Say) -> None:
    say(f"building {program.name} ({place}; about {program.build_s} s when nothing of it is built yet)")
    fresh = bin_folder() / f".{program.name}.new"
    started = reported = time.monotonic()
    compile_command = ["nice", "-n", "10", go() or "go", "build", "-trimpath", "-buildvcs=false"]
    # No C: the programs are static and run in any image. No symbol table: half the size.
    compiler = subprocess.Popen(
        [*compile_command, *program.flags, "-o", str(fresh), program.package],
        cwd=TOOLS / program.tool,
        env=os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"},
    )
    try:
        while compiler.poll() is None:
            try:
                compiler.wait(0.2)
            except subprocess.TimeoutExpired:
                if time.monotonic() - reported >= REPORT_EVERY_S:
                    reported = time.monotonic()
                    say(f"building {program.name}: {reported - started:.0f} s so far")
    finally:
        if compiler.returncode is None:
            compiler.kill()
            compiler.wait()
    if compiler.returncode != 0:
        raise ProgramMissing(f"{program.name}: go build ended with {compiler.returncode}, see above")
    fresh.replace(bin_folder() / program.name)
    say(f"built {program.name} in {time.monotonic() - started:.0f} s")


def _install_packages(packages: list[str], say: Say) -> None:
    if not packages:
        return
    names = " ".join(packages)
    if os.geteuid() != 0 or find("apt-get") is None:
        raise ProgramMissing(f"missing on this machine; as root: apt-get install {names}")
    say(f"installing {names}")
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    # The lists of a fresh machine are empty or old: update them only when the install needs it.
    for argv in (install, ["apt-get", "update", "-qq"], install):
        done = subprocess.run(
            argv,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if argv is install and done.returncode == 0:
            return
    where = "" if find_cni() else f" (CNI plugins are looked for in {', '.join(CNI_FOLDERS)})"
    raise ProgramMissing(f"apt-get install {names} failed{where}:\n{done.stdout}")
