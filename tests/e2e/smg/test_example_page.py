"""The example's page for one machine, run as it stands."""

import os
import subprocess

import psutil
import pytest
from tests.e2e.smg.page import EXAMPLE, scripts
from tests.peers.tokenspeed.remote import without_proxies

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ROOT = EXAMPLE.parents[1]


@pytest.fixture
def page(free_port, tmp_path):
    """The section's scripts as one, with a folder and ports of this test's own."""
    script = "\n".join(scripts("On one machine"))
    places = "D=~/epd-smg GATEWAY=30000 PREFILL=50061 DECODE=50062"
    assert places in script
    ours = f"D={tmp_path} GATEWAY={free_port()} PREFILL={free_port()} DECODE={free_port()}"
    path = "export PATH=$PWD/.venv/bin:$PATH"
    assert path in script
    return script.replace(places, ours).replace(path, "")


def test_the_page_leads_to_an_answer_about_a_picture_and_leaves_nothing(page, program, tmp_path):
    folder = program("encodepool").parent
    env = without_proxies(os.environ) | {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail"],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(page, timeout=500)
        assert shell.returncode == 0, said
        assert "\na picture\n" in said
        assert '"status": "Success"' in said
        # `kill` does not wait.
        left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]
        _, alive = psutil.wait_procs(left, timeout=15)
        assert alive == []
    finally:
        left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]
        for process in left:
            process.kill()
