"""What the chart makes of its values, by the real helm."""

import re
import runpy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from encodepool_operator.api.parse import parse_pool

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CHART = ROOT / "charts" / "encodepool"
ALL_OPTIONS = HERE / "all-options.yaml"
NAMESPACE = ("--set", "scope=namespace")
VARIANTS: dict[str, tuple[str | Path, ...]] = {
    "cluster": (),
    "namespace": NAMESPACE,
    "all-options": ("--values", ALL_OPTIONS),
}
NAMESPACED = {
    "Deployment",
    "NetworkPolicy",
    "Pod",
    "PodDisruptionBudget",
    "Role",
    "RoleBinding",
    "Service",
    "ServiceAccount",
    "ServiceMonitor",
}
CRD = "CustomResourceDefinition"


def by_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def split_crd(rendered: str) -> tuple[str, str]:
    """(the text without the CRD, the CRD's text or "")."""
    documents = re.split(r"(?m)^---\n", rendered)
    crds = [text for text in documents if f"\nkind: {CRD}\n" in text]
    assert len(crds) <= 1
    rest = "---\n".join(text for text in documents if text not in crds)
    return rest, crds[0].partition("templates/crds.yaml\n")[2] if crds else ""


def images(pod: dict[str, Any]) -> list[str]:
    return [container["image"] for container in pod["containers"]]


def test_what_is_copied_and_generated_is_up_to_date() -> None:
    assert runpy.run_path(str(CHART / "generate.py"))["problems"]() == []


def test_lint_finds_nothing(helm: Any) -> None:
    for arguments in VARIANTS.values():
        done = helm.lint(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        findings = [line for line in done.stdout.splitlines() if line.startswith("[")]
        assert findings == ["[INFO] Chart.yaml: icon is recommended"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_renders_as_the_golden_file_says(
    helm: Any, variant: str, same_as_golden: Callable[[str, str], None]
) -> None:
    rest, _ = split_crd(helm.render(*VARIANTS[variant]))
    same_as_golden(f"{variant}.yaml", rest)


@pytest.mark.parametrize("variant", ["cluster", "namespace"])
def test_the_notes_are_as_the_golden_file_says(
    helm: Any, variant: str, same_as_golden: Callable[[str, str], None]
) -> None:
    same_as_golden(f"notes-{variant}.txt", helm.notes(*VARIANTS[variant]))


def test_all_options_leaves_no_value_at_its_default() -> None:
    tools = runpy.run_path(str(CHART / "generate.py"))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chosen = yaml.safe_load(ALL_OPTIONS.read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    at_default = [
        ".".join(path)
        for path, _ in tools["leaves"](schema)
        if path[0] not in ("global", "enabled")
        and tools["default_of"](values, path) == tools["default_of"](chosen, path)
    ]
    # The worker's digest must be empty for its tag to be seen; without accounts and roles there is
    # nothing to look at.
    assert at_default == ["workerImage.digest", "serviceAccount.create", "rbac.create"]


def test_the_crd_is_the_one_of_the_sources_and_stays_after_uninstall(helm: Any) -> None:
    source = (ROOT / "crds" / "encodepools.yaml").read_text()
    _, kept = split_crd(helm.render())
    assert yaml.safe_load(kept)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert kept.replace("    helm.sh/resource-policy: keep\n", "").strip() == source.strip()

    _, plain = split_crd(helm.render("--set", "crds.keep=false"))
    assert plain.strip() == source.strip()


@pytest.mark.parametrize(
    ("scope", "install", "there"),
    [
        ("cluster", "auto", True),
        ("namespace", "auto", False),
        ("cluster", "false", False),
        ("namespace", "true", True),
    ],
)
def test_the_crd_comes_where_it_is_wanted(helm: Any, scope: str, install: str, there: bool) -> None:
    objects = helm.objects("--set", f"scope={scope},crds.install={install}")
    assert bool(by_kind(objects, CRD)) is there


def test_namespace_scope_makes_nothing_cluster_wide(helm: Any) -> None:
    everything = ("--set", "networkPolicy.enabled=true,metrics.serviceMonitor.enabled=true")
    objects = helm.objects(*NAMESPACE, *everything, "--set", "watchNamespaces={team-a,team-b}")
    assert {one["kind"] for one in objects} == NAMESPACED
    assert {one["metadata"].get("namespace") for one in objects} == {"system", "team-a", "team-b"}
    assert all(one["roleRef"]["kind"] == "Role" for one in by_kind(objects, "RoleBinding"))
    for name in ("team-a", "team-b"):
        kinds = sorted(one["kind"] for one in objects if one["metadata"]["namespace"] == name)
        assert kinds == ["Role", "RoleBinding"]


@pytest.mark.parametrize(
    ("arguments", "watched"),
    [
        ((), []),
        (NAMESPACE, ["system"]),
        ((*NAMESPACE, "--set", "watchNamespaces={team-a,team-b}"), ["team-a", "team-b"]),
    ],
)
def test_the_operator_watches_where_it_has_a_role(helm: Any, arguments: Any, watched: list[str]) -> None:
    objects = helm.objects(*arguments)
    (deployment,) = by_kind(objects, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    named = [value for value in container["args"] if value.startswith("--namespace=")]
    assert named == [f"--namespace={name}" for name in watched]
    roles = {
        (one["metadata"]["namespace"], one["roleRef"]["name"]) for one in by_kind(objects, "RoleBinding")
    }
    name = "encodepool-operator"
    assert roles == {(each, name) for each in watched} | {("system", f"{name}-lease")}


def rules(objects: list[dict[str, Any]], *, cluster: bool) -> set[tuple[str, str, str, str]]:
    """(group, resource, name or "", verb) of the operator's own roles."""
    found = set()
    account = {"kind": "ServiceAccount", "name": "encodepool-operator", "namespace": "system"}
    for binding in by_kind(objects, "ClusterRoleBinding" if cluster else "RoleBinding"):
        assert binding["subjects"] == [account]
        (role,) = [
            one
            for one in by_kind(objects, binding["roleRef"]["kind"])
            if one["metadata"]["name"] == binding["roleRef"]["name"]
        ]
        for rule in role["rules"]:
            names = rule.get("resourceNames", [""])
            found |= set(product(rule["apiGroups"], rule["resources"], names, rule["verbs"]))
    return found


def test_the_rules_are_spelled_out_and_those_of_both_scopes_differ_by_the_cluster_alone(helm: Any) -> None:
    wide, narrow = helm.objects(), helm.objects(*NAMESPACE)
    assert rules(narrow, cluster=True) == set()
    lease = rules(wide, cluster=False)
    assert rules(narrow, cluster=False) - rules(wide, cluster=True) == lease
    assert lease == {
        ("coordination.k8s.io", "leases", "", "create"),
        ("coordination.k8s.io", "leases", "encodepool-operator", "get"),
        ("coordination.k8s.io", "leases", "encodepool-operator", "update"),
    }
    crd = ("apiextensions.k8s.io", "customresourcedefinitions", "encodepools.encodepool.dev", "get")
    assert rules(wide, cluster=True) - rules(narrow, cluster=False) == {crd}
    for group, resource, name, verb in rules(wide, cluster=True) | rules(wide, cluster=False):
        assert "*" not in (group, resource, name, verb)
        assert resource != "secrets"


@pytest.mark.parametrize(
    ("release", "arguments"), [("r" * 53, ()), ("r", ("--set", f"fullnameOverride={'x' * 50}"))]
)
def test_long_names_are_cut_to_what_a_service_may_have(helm: Any, release: str, arguments: Any) -> None:
    (service,) = by_kind(helm.objects(*arguments, release=release), "Service")
    assert len(service["metadata"]["name"]) <= 63


def test_users_roles_come_with_the_cluster_and_can_be_left_out(helm: Any) -> None:
    names = {one["metadata"]["name"] for one in by_kind(helm.objects(), "ClusterRole")}
    assert names == {"encodepool-operator", "encodepool-operator-view", "encodepool-operator-edit"}
    fewer = by_kind(helm.objects("--set", "rbac.aggregate=false"), "ClusterRole")
    assert [one["metadata"]["name"] for one in fewer] == ["encodepool-operator"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_is_locked_down(helm: Any, variant: str) -> None:
    objects = helm.objects(*VARIANTS[variant])
    pods = [one["spec"]["template"]["spec"] for one in by_kind(objects, "Deployment")]
    pods += [one["spec"] for one in by_kind(objects, "Pod")]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}} in pod["volumes"]


def test_the_user_can_be_left_to_the_cluster(helm: Any) -> None:
    (deployment,) = by_kind(helm.objects("--set", "runAsUser=null", "--set", "runAsGroup=null"), "Deployment")
    assert deployment["spec"]["template"]["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_selectors_choose_the_operators_pods_and_no_pods_of_pools(helm: Any) -> None:
    objects = helm.objects("--set", "networkPolicy.enabled=true,metrics.serviceMonitor.enabled=true")
    (deployment,) = by_kind(objects, "Deployment")
    marks = deployment["spec"]["template"]["metadata"]["labels"]
    (budget,) = by_kind(objects, "PodDisruptionBudget")
    (policy,) = by_kind(objects, "NetworkPolicy")
    (service,) = by_kind(objects, "Service")
    (monitor,) = by_kind(objects, "ServiceMonitor")
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        budget["spec"]["selector"]["matchLabels"],
        policy["spec"]["podSelector"]["matchLabels"],
        service["spec"]["selector"],
    ]
    for selector in selectors:
        assert selector.items() <= marks.items()
        assert selector["app.kubernetes.io/component"] == "operator"  # a pool's pods say "encode"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (test_pod,) = by_kind(objects, "Pod")
    assert not selectors[0].items() <= test_pod["metadata"]["labels"].items()


def test_a_digest_comes_before_the_tag_and_the_tag_before_the_version(helm: Any) -> None:
    def image(*settings: str) -> str:
        (deployment,) = by_kind(helm.objects(*settings), "Deployment")
        (found,) = images(deployment["spec"]["template"]["spec"])
        return found

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    digest = "sha256:" + "0" * 64
    assert image() == f"encodepool/operator:{version}"
    assert image("--set", "image.tag=v2") == "encodepool/operator:v2"
    assert image("--set", f"image.tag=v2,image.digest={digest}") == f"encodepool/operator@{digest}"


def test_pools_need_an_image_of_their_own_where_the_chart_has_none(helm: Any) -> None:
    (deployment,) = by_kind(helm.objects("--set", "workerImage.repository="), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert not [value for value in container["args"] if "worker-image" in value]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        NAMESPACE,
        (*NAMESPACE, "--set", "watchNamespaces={team-a}"),
        ("--set", "workerImage.repository="),
    ],
)
def test_the_pool_in_the_notes_can_be_applied_where_the_operator_looks(helm: Any, arguments: Any) -> None:
    notes = helm.notes(*arguments)
    document = re.search(r"(?ms)^kubectl apply -f - <<END\n(.*?)\nEND\n", notes)
    assert document is not None
    pool = parse_pool(yaml.safe_load(document[1]))
    (deployment,) = by_kind(helm.objects(*arguments), "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    watched = [value.partition("=")[2] for value in args if value.startswith("--namespace=")]
    assert pool.metadata.namespace in (watched or ["default"])
    has_default = any(value.startswith("--default-worker-image=") for value in args)
    assert has_default is (pool.spec.image == "")


def test_the_notes_tell_who_has_no_crd_how_to_get_it(helm: Any) -> None:
    assert "kubectl apply --server-side -f crds/" in helm.notes(*NAMESPACE)
    assert "-f crds/" not in helm.notes()


def test_the_operators_command_takes_the_arguments_of_the_chart(helm: Any) -> None:
    from click.testing import CliRunner

    from encodepool_operator.cli.operator import run

    known = {option for parameter in run.params for option in parameter.opts}
    for arguments in VARIANTS.values():
        (deployment,) = by_kind(helm.objects(*arguments), "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["encodepool-operator"]
        assert container["args"][0] == "run"
        assert {value.partition("=")[0] for value in container["args"][1:]} <= known
        # --help after them: click checks what comes before it.
        assert CliRunner().invoke(run, [*container["args"][1:], "--help"]).exit_code == 0
