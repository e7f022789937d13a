"""The images, as far as they can be looked at without a container runtime: what their Dockerfiles install
is installed in clean environments, and their programs are started."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ("operator", "worker")
LIMIT_BYTES = 150_000_000
BASE_PACKAGES = {"libc6", "libgcc-s1", "libstdc++6"}
"""What the base image has of what Mooncake links against."""

pytestmark = pytest.mark.timeout(900)


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements" / "run.txt").read_text().split()
    return dict(line.split("==") for line in lines)


def size_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


# Operator


def test_the_operators_environment_has_its_programs_and_little_else(operator_build: Any) -> None:
    said = operator_build.run(f"{operator_build.venv}/bin/encodepool-operator --help")
    assert "The Kubernetes operator of EncodePools." in said
    assert "--default-worker-image" in operator_build.run(
        f"{operator_build.venv}/bin/encodepool-operator run --help"
    )
    assert "status" in operator_build.run(f"{operator_build.venv}/bin/encodepool --help")

    installed = operator_build.packages()
    assert {"kopf", "kubernetes", "encodepool"} <= set(installed)
    heavy = {name for name in installed if re.match(r"torch|pyzmq|grpcio|mooncake|numpy|nvidia|triton", name)}
    assert heavy == set()
    for module in ("torch", "zmq", "grpc"):
        operator_build.python(f"import importlib.util as u; assert u.find_spec({module!r}) is None")


def test_the_operators_environment_is_small(operator_build: Any) -> None:
    assert size_bytes(operator_build.venv) < LIMIT_BYTES


def test_the_operator_says_in_one_line_that_there_is_no_cluster(operator_build: Any) -> None:
    said = operator_build.run(
        f"{operator_build.venv}/bin/encodepool-operator run; test $? -eq 1",
        KUBECONFIG=str(operator_build.folder / "none"),
    )
    assert len(said.splitlines()) == 1
    assert said.startswith("encodepool-operator: ")


# Worker


def test_the_workers_environment_has_its_programs_and_no_operator(worker_build: Any) -> None:
    assert "Vision-encode workers" in worker_build.run(f"{worker_build.venv}/bin/encodepool-worker --help")
    assert "--grpc-port" in worker_build.run(f"{worker_build.venv}/bin/encodepool-worker serve --help")

    installed = set(worker_build.packages())
    assert {"torch", "pyzmq", "grpcio", "mooncake-transfer-engine-non-cuda", "encodepool"} <= installed
    assert not {"kopf", "kubernetes", "pytest", "hypothesis"} & installed
    for module in ("kopf", "kubernetes"):
        worker_build.python(f"import importlib.util as u; assert u.find_spec({module!r}) is None")


def test_cuda_runtime_is_where_the_worker_image_tells_the_linker_to_look(
    worker_build: Any, stages: Any
) -> None:
    (environment,) = stages["worker"][-1].all("ENV")
    assert "LD_LIBRARY_PATH=${VENV}/lib/cuda" in environment
    # PyPI's torch brings CUDA also to machines without a GPU.
    assert list((worker_build.venv / "lib" / "cuda").glob("libcudart.so.*"))


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="looks up which Debian package has a library")
def test_the_worker_image_has_the_libraries_that_mooncake_links_against(worker_build: Any) -> None:
    worker_build.python("import mooncake.engine")
    named = apt_packages(worker_build, "worker")
    assert named == apt_packages(worker_build, "worker-cuda12") == apt_packages(worker_build, "worker-cuda13")

    site = next((worker_build.venv / "lib").glob("python*/site-packages"))
    # nvme-of plug-ins and the like stay with who uses them: the engine is what the worker loads.
    listing = worker_build.run(f"ldd {site / 'mooncake' / 'engine.so'}")
    assert "not found" not in listing
    paths = {Path(path) for path in re.findall(r"=> (/\S+) \(", listing)}
    outside = {path for path in paths if worker_build.venv not in path.parents}
    assert outside, "Mooncake links against nothing of the system: then nothing is to be installed"
    allowed = with_dependencies({*named, *BASE_PACKAGES})
    assert {package_of(path) for path in outside} <= allowed


def apt_packages(build: Any, extra: str) -> set[str]:
    """What the step would install, told by a stand-in for apt-get."""
    folder = build.folder / "apt"
    folder.mkdir(exist_ok=True)
    (folder / "apt-get").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "apt-get").chmod(0o755)
    path = f"{folder}:{build.env['PATH']}"
    said = build.run(f"sh images/install.sh libraries {extra}", PATH=path).split()
    assert said[:2] == ["update", "-qq"]
    return {word for word in said[2:] if word != "install" and not word.startswith("-")}


def package_of(path: Path) -> str:
    """dpkg may know a file by its path from before /lib was a link."""
    for known in (path, path.resolve(), Path("/usr", *path.parts[1:]), Path("/", *path.resolve().parts[2:])):
        done = subprocess.run(["dpkg", "-S", known], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.partition(":")[0]
    return pytest.fail(f"no package has {path}")


def with_dependencies(packages: set[str]) -> set[str]:
    found: set[str] = set()
    new = set(packages)
    while new:
        found |= new
        done = subprocess.run(
            ["dpkg-query", "-W", "-f=${Depends}\n${Pre-Depends}\n", *sorted(new)],
            capture_output=True,
            text=True,
            check=False,
        )
        new = set(re.findall(r"(?:^|[,|]\s*)([a-z0-9][a-z0-9+.-]+)", done.stdout, re.MULTILINE)) - found
    return found


def test_there_is_a_worker_for_each_cuda(worker_build: Any) -> None:
    """Resolved to the version, not installed: they are a download of their own."""
    release = pins()["mooncake-transfer-engine-non-cuda"]
    for extra, engine in (
        ("worker-cuda12", "mooncake-transfer-engine"),
        ("worker-cuda13", "mooncake-transfer-engine-cuda13"),
    ):
        said = worker_build.run(
            f"sh images/install.sh dependencies {extra} {worker_build.folder / extra} --dry-run"
        )
        assert re.search(rf"\+ {engine}=={re.escape(release)}\b", said), said
        assert re.search(rf"\+ torch=={re.escape(pins()['torch'])}\b", said), said
        assert "non-cuda" not in said


# Both


def test_everything_is_installed_at_the_version_of_the_lock(operator_build: Any, worker_build: Any) -> None:
    for build in (operator_build, worker_build):
        installed = build.packages()
        assert re.fullmatch(r"file://.*\.whl", installed.pop("encodepool")), "the project is not a wheel"
        assert {name: version for name, version in installed.items() if pins().get(name) != version} == {}


def test_byte_code_is_there_for_what_the_programs_import(operator_build: Any, worker_build: Any) -> None:
    for build, imported, other in (
        (operator_build, "encodepool_operator/controller", "encodepool_worker"),
        (worker_build, "encodepool_worker/frontend", "encodepool_operator"),
    ):
        site = next((build.venv / "lib").glob("python*/site-packages"))
        assert list((site / imported / "__pycache__").glob("*.pyc"))
        assert list((site / other).rglob("*.pyc")) == []


def test_the_environments_hold_no_path_of_the_build(operator_build: Any) -> None:
    """They are copied to another image: links must lead out to its Python, and nowhere else."""
    links = [path for path in operator_build.venv.rglob("*") if path.is_symlink()]
    strangers = [
        path
        for path in links
        if operator_build.folder in Path(os.readlink(path)).parents
        and operator_build.venv not in Path(os.readlink(path)).parents
    ]
    assert strangers == []


@pytest.mark.parametrize("name", NAMES)
def test_the_image_is_made_in_stages_and_not_root(name: str, stages: Any) -> None:
    before, build, final = stages[name]
    assert build.name == "build"
    assert before.all("ARG") == ["BASE=python:3.11-slim-bookworm"]
    assert build.base == final.base == "${BASE}", "the environment needs the Python it was made with"
    user, group = final.all("USER")[-1].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert final.all("COPY")[-1] == "--from=build ${VENV} ${VENV}"
    assert not any("pip" in step or "uv" in step.split() for step in final.all("RUN"))
    (environment,) = final.all("ENV")
    assert "PATH=${VENV}/bin:${PATH}" in environment
    assert final.all("ADD") + build.all("ADD") == []


@pytest.mark.parametrize("name", NAMES)
def test_the_image_starts_a_program_that_is_there(
    name: str, stages: Any, request: pytest.FixtureRequest
) -> None:
    (entry,) = json.loads(stages[name][-1].all("ENTRYPOINT")[0])
    (command,) = json.loads(stages[name][-1].all("CMD")[0])
    program = request.getfixturevalue(f"{name}_build").venv / "bin" / entry
    done = subprocess.run([program, command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_both_images_build_with_the_uv_that_the_project_pins(operator_build: Any) -> None:
    pinned = re.search(r"(?m)^uv_pin=uv==(\S+)$", (ROOT / "scripts" / "setup.sh").read_text())
    assert pinned is not None
    assert operator_build.run(f"{operator_build.base}/bin/uv --version").split()[1] == pinned[1]
