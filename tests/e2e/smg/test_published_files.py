"""What a pool publishes for gateways without a file to follow: a command line, and bodies for its API."""

import json
import shlex

import pytest
from tests.peers.smg.gateway import picture

from encodepool_operator.core.consumer import QUICK, ways

pytestmark = pytest.mark.real


@pytest.fixture
def others(language):
    """Prefill and decode as a command line."""
    prefill, decode = language.call("workers")
    flags = ["--prefill", prefill["url"], str(prefill["bootstrap_port"]), "--decode", decode["url"]]
    return flags, [prefill, decode]


@pytest.fixture
def answers(chain, new_seeds, wait_for):
    """``answers(gateway)``: a chat with an image goes through it to the pool."""

    def check(gateway):
        since, [seed] = chain.count(), new_seeds(1)
        answer = gateway.chat([picture(seed)])
        assert answer.status == 200, answer.body
        wait_for(lambda: chain.count() > since, what="the image at prefill")
        assert [record["status"] for record in chain.records(since)] == ["Success"]

    return check


@pytest.fixture
def listed(chain):
    return {(entry["url"], entry["bootstrap_port"]) for entry in chain.pool.listed().values()}


def test_smg_args_start_a_gateway(chain, others, listed, start_gateway, answers):
    """Behind the flags that the pool's status recommends for it."""
    static = next(way for way in ways("default", "seen") if way.key == "smgStatic")
    flags = [flag for flag in static.flags.split() if flag != "--epd-disaggregation"]
    gateway = start_gateway(*flags, *shlex.split(chain.pool.published("smg-args")), *others[0])
    gateway.wait_workers(listed)
    answers(gateway)
    gateway.stop()


def test_every_body_of_smg_workers_is_taken_by_the_gateways_api(
    chain, others, listed, start_gateway, answers, tmp_path
):
    nobody = tmp_path / "workers.json"
    nobody.write_text(json.dumps({"version": 1, "workers": others[1]}))
    gateway = start_gateway("--discovery-provider", "file", "--discovery-file", str(nobody), *QUICK.split())
    gateway.wait_workers(set())
    bodies = json.loads(chain.pool.published("smg-workers.json"))
    for body in bodies:
        status, text = gateway.request("POST", "/workers", body)
        assert status == 202, text
    gateway.wait_workers(listed)
    answers(gateway)
    gateway.stop()
