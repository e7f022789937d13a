"""What the API server does on bad days: refusals, conflicts, and watches that end, expire or fall silent.

The operator asks through a proxy that makes the faults; the API server behind it is real.
"""

import itertools
import sys
import time
from contextlib import contextmanager

import pytest
from kubernetes import client
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.kit.waiting import wait_for
from tests.cluster.operator_stage import (
    OperatorProcess,
    Pools,
    StandIn,
    admin_kubeconfig,
    apply_definition,
    start_operator,
)

from encodepool_operator.controller import observe

USER = "through-the-proxy"
HOME = "operator-faults"
KINDS = len(observe.WATCHED)

# The command has no option for the period: five minutes are right for everybody but a test.
IMPATIENT = """
import asyncio, sys
from encodepool_operator.controller.run import Operator, Options
from encodepool_operator.kube.login import log_in
from encodepool_operator.local.logs import setup_logs

async def run(namespace, period_s):
    options = Options((namespace,), host="127.0.0.1", port=0, lease_namespace=namespace)
    return await Operator(options, await log_in(), resync_s=period_s).run()

setup_logs()
sys.exit(asyncio.run(run(sys.argv[1], float(sys.argv[2]))))
"""


@pytest.fixture(scope="module")
def upstream(cluster, kube):
    """Who the proxy is to the API server."""
    apply_definition(kube)
    return admin_kubeconfig(cluster, USER)


@contextmanager
def stage(kube, namespace, upstream, folder):
    """A proxy, and pools of one namespace whose pods come up."""
    with FaultProxy(upstream, folder).running() as proxy, StandIn(kube, namespace).running():
        yield proxy, Pools(kube, namespace)


@contextmanager
def running_operator(spawn, program, proxy, namespace, folder):
    """It has taken its Lease, and watches all of its kinds."""
    here = ("--namespace", namespace, "--lease-namespace", namespace)
    operator = start_operator(spawn, program, proxy.kubeconfig, folder / "operator.log", *here)
    operator.wait_line("lease taken")
    wait_for(lambda: proxy.open_watches == KINDS, 30, "all watches")
    yield operator
    proxy.mend()
    if operator.running:
        assert operator.stop() == 0, operator.log()


@pytest.fixture(scope="module")
def shared(kube, upstream, spawn, program, tmp_path_factory):
    """Of the tests after which the operator goes on."""
    core = client.CoreV1Api(kube)
    core.create_namespace({"metadata": {"name": HOME}})
    wait_for(lambda: core.list_namespaced_service_account(HOME).items, what="the service account")
    folder = tmp_path_factory.mktemp("faults")
    with (
        stage(kube, HOME, upstream, folder) as (proxy, pools),
        running_operator(spawn, program, proxy, HOME, folder) as operator,
    ):
        yield proxy, pools, operator
    core.delete_namespace(HOME)


@pytest.fixture
def proxy(shared):
    yield shared[0]
    shared[0].mend()


@pytest.fixture
def pools(shared):
    return shared[1]


@pytest.fixture
def operator(shared):
    yield shared[2]
    assert shared[2].running, shared[2].log()


@pytest.fixture
def own(kube, namespace, upstream, tmp_path):
    """A proxy and pools of the test's own."""
    with stage(kube, namespace, upstream, tmp_path) as made:
        yield made


def writes_of(kind):
    return lambda asked: asked.method != "GET" and asked.kind == kind


def gaps(asked):
    times = [one.at_s for one in asked]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def is_watch(asked):
    return asked.watch


def test_a_pool_comes_up_through_conflicts_refusals_and_lost_answers(proxy, operator, pools):
    faults = [
        proxy.fault(writes_of("statefulsets"), code=409, times=2),
        proxy.fault(writes_of("services"), code=500, times=2),
        proxy.fault(writes_of("configmaps"), code=503, times=4),  # more than the client tries by itself
        proxy.fault(writes_of("poddisruptionbudgets"), cut=True, times=2),
        proxy.fault(writes_of("controllerrevisions"), code=429, after_s=1, times=1),
        proxy.fault(writes_of("encodepools"), code=409, times=2),
        proxy.fault(writes_of("pods"), code=409, times=1),
    ]
    pools.create("tried")
    pools.wait_ready("tried", 60)
    assert len(pools.workers("tried")) == 2
    assert [len(fault.met) for fault in faults] == [2, 2, 4, 2, 1, 2, 1]

    # Who was asked to wait has waited.
    (busy,) = (fault.met[0] for fault in faults if fault.code == 429)
    again = next(one for one in proxy.asked if one.number > busy.number and one.path == busy.path)
    assert again.at_s - busy.at_s >= 1.0
    # None of it is held against the pool or its groups.
    assert pools.condition("tried", "Stalled")["status"] == ""
    assert pools.condition("tried", "Degraded")["status"] == "False"
    assert not {"GroupFailed", "WriteRefused"} & {reason for reason, _ in pools.events("tried")}


def test_what_fails_for_long_is_tried_ever_more_seldom_and_holds_up_nobody(proxy, operator, pools):
    bad = proxy.fault(lambda asked: asked.method == "PATCH" and "/stuck-" in asked.path, code=503)
    pools.create("stuck", replicas=1)
    began_s = time.monotonic()
    pools.create("other", replicas=1)
    pools.wait_ready("other")
    # The client tries three times within a second; then the pool waits, longer each time.
    wait_for(lambda: len(bad.met) >= 13, 60, "five looks at the pool")
    looks = [gap for gap in gaps(bad.met) if gap > 0.5]
    assert looks[-1] > looks[0]
    assert max(looks) < 60
    assert len(bad.met) < 3 * (time.monotonic() - began_s) + 4
    proxy.mend()
    pools.wait_ready("stuck", 60)


def test_cut_and_refused_watches_are_taken_up_again_and_nothing_is_missed(proxy, operator, pools):
    pools.create("seen", replicas=1)
    pools.wait_ready("seen")
    for code in (429, 500, 503):
        before = pools.workers("seen")
        fault = proxy.fault(is_watch, code=code, after_s=0 if code == 429 else None, times=KINDS)
        assert proxy.cut_watches() == KINDS
        pools.core.delete_namespaced_pod("seen-0-0", pools.namespace)

        def replaced(before=before):
            found = pools.workers("seen")
            return found and found != before

        wait_for(replaced, 40, f"another incarnation after watches answered {code}")
        assert len(fault.met) == KINDS
        wait_for(lambda: proxy.open_watches == KINDS, 40, "all watches again")
        proxy.mend()


def test_after_410_inside_a_watch_what_was_deleted_meanwhile_is_missed_by_nobody(proxy, operator, pools):
    pools.create("gap", replicas=2)
    pools.wait_ready("gap")
    wait_for(lambda: len(pools.workers("gap")) == 2, what="the list")
    # No watch gets through, until all of them have been told that their version is too old.
    away = proxy.fault(is_watch, code=503)
    proxy.cut_watches()
    wait_for(lambda: away.met, 20, "a watch that finds nobody")
    pools.core.delete_namespaced_service("gap-encode", pools.namespace)
    pools.core.delete_namespaced_pod("gap-1-0", pools.namespace)
    proxy.mend()
    expired = proxy.fault(is_watch, inside=410, times=KINDS)
    wait_for(lambda: len(expired.met) == KINDS, 40, "every watch expiring")
    wait_for(lambda: "Service/gap-encode" in pools.children("gap"), 40, "the Service again")

    def again():
        listed = {worker["id"].rpartition("/")[2] for worker in pools.workers("gap")}
        return len(listed) == 2 and "1-2" not in listed

    wait_for(again, 40, "group 1 in another incarnation")


@pytest.mark.parametrize("how", [{"code": 410}, {"inside": 500}], ids=["410 instead", "500 inside"])
def test_a_watch_that_ends_for_good_ends_the_process_which_lets_the_lease_go(
    own, spawn, program, tmp_path, how
):
    """At once, and by its own doing: kopf would first cancel whatever the process is about."""
    proxy, pools = own
    with running_operator(spawn, program, proxy, pools.namespace, tmp_path) as operator:
        proxy.fault(lambda asked: asked.watch and asked.kind == "services", times=1, **how)
        proxy.cut_watches()
        wait_for(lambda: not operator.running, 40, "the end of the process")
        assert operator.stop() == 1
        log = operator.log()
    assert "part=watch" in log
    assert "a watch has ended" in log
    assert "lease released" in log


def test_a_watch_that_falls_silent_costs_a_period_and_then_the_process(own, spawn, tmp_path):
    proxy, pools = own
    log = tmp_path / "impatient.log"
    argv = [sys.executable, "-c", IMPATIENT, pools.namespace, "2"]
    operator = OperatorProcess(spawn(argv, log, env={"KUBECONFIG": str(proxy.kubeconfig)}), log)
    operator.wait_line("lease taken")
    pools.create("deaf", replicas=1)
    pools.wait_ready("deaf")
    wait_for(lambda: proxy.open_watches == KINDS, 30, "seven watches")
    before = wait_for(lambda: pools.workers("deaf"), what="the list")

    proxy.fault(lambda asked: asked.watch and asked.kind == "pods", mute=True)
    pools.core.delete_namespaced_pod("deaf-0-0", pools.namespace)

    # Each comparison tells what the watch does not, so the pool is right all the same ...
    def replaced():
        found = pools.workers("deaf")
        return found and found != before

    wait_for(replaced, 40, "another incarnation")
    assert "a list knew better than the watch" in operator.log()
    # ... and a watch that has still said nothing a period later ends the process, for a new one.
    wait_for(lambda: not operator.running, 40, "the end of the process")
    assert operator.stop() == 1
    assert "the watch of pods has not told of" in operator.log()
    assert "lease released" in operator.log()
