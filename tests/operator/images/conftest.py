"""The Dockerfiles, and their build stages carried out on this machine.

No container runtime is needed: a build stage here is a folder with what the Dockerfile copies, a fresh
Python in place of the base image's, and the RUN steps, word by word.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PASSED_ON = re.compile(r"(PIP|UV|SSL|REQUESTS)_.*|(https?|all|no)_proxy|HOME|LANG", re.IGNORECASE)
"""Variables that say how packages are reached from this machine."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, ``RUN`` without its mounts."""

    word: str
    rest: str


@dataclass(slots=True)
class Stage:
    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [step.rest for step in self.steps if step.word == word]


def read_stages(name: str) -> list[Stage]:
    """The stages of ``images/<name>.Dockerfile``; what stands before the first FROM is a stage ""."""
    text = (ROOT / "images" / f"{name}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    stages = [Stage("", "")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        rest = re.sub(r"^(--mount=\S+\s+)+", "", rest.strip()) if word == "RUN" else rest.strip()
        if word == "FROM":
            base, _, stage = rest.partition(" AS ")
            stages.append(Stage(base, stage))
        elif word:
            stages[-1].steps.append(Step(word, rest))
    return stages


def make_context(folder: Path) -> None:
    """What a build may copy: this checkout, as far as .dockerignore lets it through."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *rules = [line for line in lines if line and not line.startswith("#")]
    assert first == "*", "an image is made of what is named, never of what happens to lie around"
    left_out = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    wanted = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    assert len(left_out) + len(wanted) == len(rules)
    for name in wanted:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*left_out))
        else:
            shutil.copy2(source, target)


@dataclass(slots=True)
class Build:
    """A build stage; ``venv`` is the environment that the final stage copies."""

    folder: Path
    arguments: dict[str, str]
    venv: Path
    base: Path
    env: dict[str, str] = field(default_factory=dict)

    def run(self, command: str, **more: str) -> str:
        """A command line as in RUN. Returns what it said; a failure fails the test with it."""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.folder / "src",
            env=self.env | self.arguments | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"{command}\n{done.stdout[-4000:]}")
        return done.stdout

    def python(self, code: str) -> str:
        return self.run(f"{shlex.quote(str(self.venv / 'bin' / 'python'))} -c {shlex.quote(code)}")

    def packages(self) -> dict[str, str]:
        """What is installed: name -> version."""
        said = self.run(f"VIRTUAL_ENV={shlex.quote(str(self.venv))} uv pip freeze")
        return dict(re.findall(r"(?m)^(\S+?)(?:==| @ )(\S+)$", said))


def start_build(folder: Path, **arguments: str) -> Build:
    """A build stage before its first step: a context, and a Python of its own as the base image has."""
    (folder / "src").mkdir(parents=True)
    make_context(folder / "context")
    base = folder / "base"
    subprocess.run([sys.executable, "-m", "venv", base], check=True, timeout=300)
    env = {key: value for key, value in os.environ.items() if PASSED_ON.fullmatch(key)}
    env["PATH"] = f"{base / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    env.pop("UV_PYTHON", None)
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # as in the image: what is there was made on purpose
    env["UV_LINK_MODE"] = "hardlink"
    venv = folder / "venv"
    return Build(folder, {"VENV": str(venv), **arguments}, venv, base, env)


def carry_out(name: str, build: Build) -> None:
    """The whole build stage of ``images/<name>.Dockerfile``."""
    (stage,) = [one for one in read_stages(name) if one.name == "build"]
    source = build.folder / "src"
    for step in stage.steps:
        match step.word:
            case "ARG":
                key, _, default = step.rest.partition("=")
                build.arguments.setdefault(key, default)
            case "ENV":
                # Not uv's own: here its cache is this machine's, and links to it are as good as copies.
                given = dict(part.split("=", 1) for part in shlex.split(step.rest))
                build.env |= {key: value for key, value in given.items() if not key.startswith("UV_")}
            case "WORKDIR":
                assert step.rest == "/src"
            case "COPY":
                *names, target = step.rest.split()
                for one in names:
                    copy(build.folder / "context" / one, source / target, into=target.endswith("/"))
            case "RUN":
                build.run(step.rest)
            case other:
                pytest.fail(f"{name}.Dockerfile: {other} is not known here")


def copy(found: Path, target: Path, *, into: bool) -> None:
    assert found.exists(), f"{found.name} is copied by a Dockerfile, and kept out by .dockerignore"
    if found.is_dir():
        shutil.copytree(found, target, dirs_exist_ok=True)
        return
    target = target / found.name if into else target
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(found, target)


@pytest.fixture(scope="session")
def stages() -> Mapping[str, list[Stage]]:
    return {name: read_stages(name) for name in ("operator", "worker")}


@pytest.fixture(scope="session")
def operator_build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    build = start_build(tmp_path_factory.mktemp("operator-image"))
    carry_out("operator", build)
    yield build
    shutil.rmtree(build.folder)


@pytest.fixture(scope="session")
def worker_build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """With torch from PyPI, the one build that is in the lock and in everybody's reach."""
    build = start_build(tmp_path_factory.mktemp("worker-image"), TORCH_BACKEND="pypi")
    carry_out("worker", build)
    yield build
    shutil.rmtree(build.folder)
