"""The chart on a cluster with nodes: helm and kubectl as users run them, and the operator's pods."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml
from kubernetes import client
from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from tests.cluster.kit.audit import now
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.deploy import operator_values
from tests.cluster.kit.pods import CHECKOUT
from tests.cluster.kit.programs import need
from tests.cluster.kit.waiting import wait_for
from tests.cluster.operator_stage import GROUP, PLURAL

CHART = CHECKOUT / "charts" / "encodepool"
CRD = f"{PLURAL}.{GROUP}"
RELEASE = "encodepool"
DEPLOYMENT = LEASE = "encodepool-operator"
OPERATOR_PODS = "app.kubernetes.io/component=operator"
START_S = "90s"
Object = dict[str, Any]


class Shell:
    """helm and kubectl for one user of the cluster, in a folder of their own. ``values``: a file with
    ``operator_values``."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.values = folder / "values.yaml"
        self.values.write_text(yaml.safe_dump(operator_values()))
        self._programs = {name: need(name) for name in ("helm", "kubectl")}
        found = ":".join(str(path.parent) for path in self._programs.values())
        self._env = {"PATH": f"{found}:/usr/bin:/bin", "HOME": str(folder), "KUBECONFIG": str(kubeconfig)}

    def _run(self, argv: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            input=text,
            env=self._env,
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def helm(self, *arguments: str | Path) -> str:
        """Its output. Raises AssertionError with what it said if it fails."""
        done = self.try_helm(*arguments)
        assert done.returncode == 0, f"helm {arguments}: {done.stderr}{done.stdout}"
        return done.stdout

    def try_helm(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self._run([str(self._programs["helm"]), *map(str, arguments)])

    def install(self, namespace: str, *arguments: str | Path, chart: Path = CHART) -> str:
        """Install the release and wait until its pods are Ready; the notes."""
        return self.helm("install", RELEASE, chart, *self._usual(namespace), *arguments).partition(
            "NOTES:\n"
        )[2]

    def upgrade(self, namespace: str, *arguments: str | Path, chart: Path = CHART) -> str:
        """Upgrade it as README.md has it; the notes."""
        usual = ("--namespace", namespace, "--wait", "--timeout", START_S, "--reset-then-reuse-values")
        return self.helm("upgrade", RELEASE, chart, *usual, *arguments).partition("NOTES:\n")[2]

    def uninstall(self, namespace: str) -> str:
        return self.helm("uninstall", RELEASE, "--namespace", namespace, "--wait", "--timeout", START_S)

    def _usual(self, namespace: str) -> tuple[str | Path, ...]:
        return ("--namespace", namespace, "--values", self.values, "--wait", "--timeout", START_S)

    def kubectl(self, *arguments: str, text: str = "") -> str:
        """Its output; ``text`` is its input. Raises AssertionError with what it said if it fails."""
        done = self.try_kubectl(*arguments, text=text)
        assert done.returncode == 0, f"kubectl {arguments}: {done.stderr}{done.stdout}"
        return done.stdout

    def try_kubectl(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return self._run([str(self._programs["kubectl"]), *arguments], text)

    def script(self, text: str) -> str:
        """Run lines of a shell as they are; their output. Raises AssertionError if one fails."""
        done = self._run(["/bin/bash", "-e"], text)
        assert (done.returncode, done.stderr) == (0, ""), f"{text}\n{done.stderr}{done.stdout}"
        return done.stdout


def commands(notes: str) -> list[str]:
    """The commands in notes or a page, to be run as they are printed: paragraphs that begin with one."""
    paragraphs = re.split(r"\n[ \t]*\n", notes)
    return [text.strip("\n") for text in paragraphs if re.match(r"\s*(kubectl|helm) ", text)]


# The chart's previous version


def previous_chart(folder: Path, *gone: str) -> Path:
    """A copy of the chart as if it were older: version 0.0.9, and a CRD of an earlier generation that
    lacks the fields ``gone``, as in "spec.model.revision"."""
    copy = folder / "previous"
    shutil.copytree(CHART, copy)
    about = copy / "Chart.yaml"
    version = yaml.safe_load(about.read_text())["version"]
    about.write_text(about.read_text().replace(version, "0.0.9"))
    (copy / "files" / "encodepools.yaml").write_text(yaml.safe_dump(older_definition(*gone)))
    # The template looks for the head of the generated file.
    template = copy / "templates" / "crds.yaml"
    template.write_text('{{ .Files.Get "files/encodepools.yaml" }}\n')
    return copy


def older_definition(*gone: str) -> Object:
    """The CRD of this checkout without these fields, and with the generation before the first."""
    definition: Object = yaml.safe_load((CHECKOUT / "crds" / "encodepools.yaml").read_text())
    annotations = definition["metadata"]["annotations"]
    annotations |= {f"{GROUP}/schema-generation": "0", "helm.sh/resource-policy": "keep"}
    root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path in gone:
        *above, name = path.split(".")
        schema = root
        for part in above:
            schema = schema["properties"][part]
        del schema["properties"][name]
    return definition


def remove_definition(api: ApiClient) -> None:
    """No CRD, and so no pools; returns when it is gone."""
    extensions = client.ApiextensionsV1Api(api)

    def gone() -> bool:
        try:
            extensions.delete_custom_resource_definition(CRD)
        except ApiException as error:
            if error.status != 404:
                raise
            return True
        return False

    wait_for(gone, 60, "the CRD being gone")


# The operator's pods


def operator_pods(api: ApiClient, namespace: str) -> list[Any]:
    """Those that are not ending, by name."""
    found = client.CoreV1Api(api).list_namespaced_pod(namespace, label_selector=OPERATOR_PODS).items
    return sorted(
        (pod for pod in found if pod.metadata.deletion_timestamp is None), key=lambda pod: pod.metadata.name
    )


def lease_holder(api: ApiClient, namespace: str) -> str:
    """Name of the pod that leads, "" if none does."""
    lease = client.CoordinationV1Api(api).read_namespaced_lease(LEASE, namespace)
    return (lease.spec.holder_identity or "").rpartition("-")[0]


def first_process(cluster: Cluster, pod: Any) -> psutil.Process:
    """Process 1 of the pod's only container, as this machine sees it."""
    for process in psutil.Process(cluster.first_process(pod.spec.node_name)).children(recursive=True):
        try:
            named = process.environ().get("HOSTNAME") == pod.metadata.name
            if named and any(word.endswith("/encodepool-operator") for word in process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    raise AssertionError(f"nothing runs for {pod.metadata.name}")


# A release


@dataclass(frozen=True, slots=True)
class Release:
    """An installed chart. ``since`` is before its installation, for the audit log."""

    shell: Shell
    namespace: str
    notes: str
    since: datetime

    @property
    def account(self) -> str:
        """The operator's name as a user."""
        return f"system:serviceaccount:{self.namespace}:{DEPLOYMENT}"


@contextmanager
def released(
    shell: Shell, api: ApiClient, namespace: str, *arguments: str | Path, chart: Path = CHART
) -> Iterator[Release]:
    """The chart in a namespace of its own. Afterwards release, namespace and CRD are gone."""
    remove_definition(api)
    since = now()
    try:
        notes = shell.install(namespace, "--create-namespace", *arguments, chart=chart)
        yield Release(shell, namespace, notes, since)
    finally:
        shell.try_helm("uninstall", RELEASE, "--namespace", namespace, "--wait")
        shell.try_kubectl("delete", "namespace", namespace, "--wait=false")
        remove_definition(api)
