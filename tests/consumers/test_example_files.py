"""What of the example's files no test can try: its image, and how each pod makes its model."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "epd-smg"
OURS = "REGISTRY/worker:0.1.0"


def test_the_image_is_made_of_what_its_build_is_given():
    """The .dockerignore beside a Dockerfile comes before the one at the root."""
    lines = (EXAMPLE / "Dockerfile.dockerignore").read_text().splitlines()
    first, *rules = [line for line in lines if line and not line.startswith("#")]
    assert first == "*"
    given = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = re.findall(r"^COPY (.+) \S+$", (EXAMPLE / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for names in copied for name in names.split()} == given
    assert [name for name in sorted(given) if not (ROOT / name).exists()] == []


def test_every_pod_makes_its_model_as_the_tried_example_does():
    """``examples/tiny-cluster.yaml`` is started on nodes with its init container."""
    tried = yaml.safe_load((ROOT / "examples" / "tiny-cluster.yaml").read_text())
    [expected] = tried["spec"]["podTemplate"]["spec"]["initContainers"]
    seen = 0
    for file in sorted(EXAMPLE.glob("cluster*/*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            spec = document.get("spec", {})
            pod = spec.get("podTemplate", spec.get("template", {})).get("spec", {})
            for container in pod.get("initContainers", ()):
                for mount in container["volumeMounts"]:
                    mount["name"] = f"encodepool-{mount['name'].removeprefix('encodepool-')}"
                assert container == expected | {"image": OURS}, file
                seen += 1
    assert seen == 5
