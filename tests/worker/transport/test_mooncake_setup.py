"""What MooncakeEngine sets before Mooncake starts, and what it says when it cannot start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from encodepool_worker.errors import ConfigError
from encodepool_worker.transport.mooncake import MooncakeEngine, apply_environment, wanted_environment
from encodepool_worker.transport.ranges import Ranges


def test_over_tcp_the_progress_timeout_comes_first():
    """After the progress timeout the connection is closed; after the transfer timeout it is not."""
    wanted = wanted_environment("tcp", 5.0)
    assert wanted == {
        "MC_FORCE_TCP": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
        "MC_TCP_STATUS_TIMEOUT_SEC": "5",
        "MC_TRANSFER_TIMEOUT": "30",
        "MC_LOG_LEVEL": "ERROR",
        "GLOG_minloglevel": "3",
    }
    assert wanted_environment("tcp", 19.2)["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "20"
    assert wanted_environment("tcp", 19.2)["MC_TRANSFER_TIMEOUT"] == "60"


def test_over_rdma_only_the_transfer_timeout_is_set():
    assert wanted_environment("rdma", 2.0)["MC_TRANSFER_TIMEOUT"] == "5"
    assert "MC_FORCE_TCP" not in wanted_environment("rdma", 2.0)


def test_what_the_user_has_set_stays_and_what_we_set_may_change():
    environ, ours = {"MC_LOG_LEVEL": "INFO"}, {}
    apply_environment(wanted_environment("tcp", 5.0), environ, ours)
    apply_environment(wanted_environment("tcp", 7.0), environ, ours)  # another engine
    assert environ["MC_LOG_LEVEL"] == "INFO"
    assert environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "7"
    apply_environment(wanted_environment("rdma", 7.0), environ, ours)
    assert "MC_FORCE_TCP" not in environ


def test_a_missing_wheel_is_named_with_its_extras_and_libraries():
    code = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from encodepool_worker.errors import ConfigError\n"
        "from encodepool_worker.transport.mooncake import MooncakeEngine\n"
        "try: MooncakeEngine('127.0.0.1')\n"
        "except ConfigError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for word in ("worker-cuda12", "worker-cuda13", "libibverbs1 librdmacm1 libnuma1 liburing2"):
        assert word in done.stdout


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this machine has RDMA devices")
def test_rdma_without_devices_is_an_error_not_a_silent_fallback():
    code = (
        "from encodepool_worker.errors import ConfigError\n"
        "from encodepool_worker.transport.mooncake import MooncakeEngine\n"
        "try: MooncakeEngine('127.0.0.1', protocol='rdma')\n"
        "except ConfigError as exc: print(exc)\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True
    )
    assert "no RDMA devices" in done.stdout


def test_another_protocol_is_refused():
    with pytest.raises(ConfigError, match="nvlink"):
        MooncakeEngine("127.0.0.1", protocol="nvlink")


def test_ranges_know_what_they_hold():
    ranges = Ranges()
    ranges.add(1000, 100)
    ranges.add(1100, 50)
    assert ranges.missing([(1000, 100), (1100, 50), (1050, 1)]) is None
    assert ranges.missing([(1000, 100), (1050, 100)]) == (1050, 100)  # no range holds it whole
    assert ranges.missing([(999, 1)]) == (999, 1)
    assert ranges.missing([(1149, 2)]) == (1149, 2)
    assert ranges.missing([(5000, 1)]) == (5000, 1)
    assert ranges.remove(1000)
    assert not ranges.remove(1000)
    assert ranges.missing([(1000, 1)]) == (1000, 1)
