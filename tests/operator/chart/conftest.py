"""The real helm on the real chart."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kit.programs import bin_folder

CHART = Path(__file__).parents[3] / "charts" / "encodepool"
OLDEST = "1.30.0"


class Helm:
    """Offline: helm takes the cluster to be the oldest that is supported."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self._folder = folder
        homes = {f"HELM_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        self._env = {"PATH": os.environ["PATH"], "HOME": str(folder), **homes}

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *arguments], env=self._env, capture_output=True, text=True, timeout=60, check=False
        )

    def lint(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("lint", "--strict", CHART, "--kube-version", OLDEST, *arguments)

    def template(
        self,
        *arguments: str | Path,
        chart: Path = CHART,
        release: str = "encodepool",
        namespace: str = "system",
    ) -> subprocess.CompletedProcess[str]:
        return self.run(
            "template", release, chart, "--namespace", namespace, "--kube-version", OLDEST, *arguments
        )

    def render(self, *arguments: str | Path, **where: Any) -> str:
        done = self.template(*arguments, **where)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, *arguments: str | Path, **where: Any) -> list[dict[str, Any]]:
        return [one for one in yaml.load_all(self.render(*arguments, **where), yaml.CSafeLoader) if one]

    def refusal(self, *arguments: str | Path) -> str:
        """What helm says to values that it does not take."""
        done = self.template(*arguments)
        assert done.returncode != 0, f"helm took {arguments}"
        return done.stderr

    def notes(self, *arguments: str | Path) -> str:
        """NOTES.txt, which helm shows only where there is a cluster: rendered as one more object."""
        copy = self._folder / "with-notes"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(CHART, copy)
        (copy / "templates" / "shown.yaml").write_text('notes: {{ include "encodepool.notes" . | toJson }}\n')
        assert (copy / "templates" / "NOTES.txt").read_text() == '{{ include "encodepool.notes" . }}\n'
        shown = yaml.safe_load(self.render("--show-only", "templates/shown.yaml", *arguments, chart=copy))
        return str(shown["notes"])


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    folders = [os.environ.get("KUBEBUILDER_ASSETS", ""), str(bin_folder()), os.environ.get("PATH", "")]
    program = shutil.which("helm", path=os.pathsep.join(filter(None, folders)))
    if program is None:
        why = "no helm in KUBEBUILDER_ASSETS, the user cache or PATH: run `make cluster-programs`"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return Helm(Path(program), tmp_path_factory.mktemp("helm"))


@pytest.fixture
def same_as_golden() -> Callable[[str, str], None]:
    """``same_as_golden(name, text)``; with WRITE_GOLDEN set, the file is written instead."""

    def compare(name: str, text: str) -> None:
        file = Path(__file__).parent / "golden" / name
        if os.environ.get("WRITE_GOLDEN"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert file.is_file(), f"{file.name} is not there: run this test with WRITE_GOLDEN=1"
        assert text == file.read_text(), (
            f"if the change is meant: WRITE_GOLDEN=1 pytest {file.parent.parent.name}"
        )

    return compare
