"""Every child of a few pools, compared with files.

``UPDATE_GOLDEN=1 pytest tests/operator/core/render`` writes the files anew, and the same with
tests/cluster/test_operator_render.py the server's answers in ``live``; read the difference. A
changed pod template reaches new revisions only, so it moves no pod of a pool that exists; should it,
raise ``RENDER_VERSION``.
"""

import os
from pathlib import Path

import pytest
import yaml
from tests.operator.core.render.render_pools import POOLS, objects_of, pool_of

GOLDEN = Path(__file__).parent / "golden"


class Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


def dumped(objects):
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=True, width=1000, explicit_start=True)


@pytest.mark.parametrize("name", POOLS)
def test_children_are_rendered_as_the_file_says(name):
    text = dumped(objects_of(pool_of(name)))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(POOLS)
