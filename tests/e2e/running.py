"""A real worker: the processes of ``encodepool-worker serve`` and what is visible of them."""

import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc, tokenspeed_scheduler_pb2_grpc
from tests.warm.client import WarmProcess

HOST = "127.0.0.1"
START_S = 90.0
CHANNEL_OPTIONS = [("grpc.max_send_message_length", 256 << 20), ("grpc.enable_http_proxy", 0)]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def http(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, str]:
    """Status and text of an answer; (0, reason) without one."""
    try:
        request = urllib.request.Request(url, data=body, method=method)
        with DIRECT.open(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (urllib.error.URLError, OSError) as error:
        return 0, str(error)


class RunningWorker:
    """One worker from its start to its end; every address is on 127.0.0.1."""

    def __init__(
        self,
        start: Callable[..., subprocess.Popen[bytes] | WarmProcess],
        command: Sequence[str | Path],
        model: Path,
        log: Path,
        free_port: Callable[[], int],
        flags: dict[str, Any],
    ) -> None:
        self.grpc_port, self.bootstrap_port, self.metrics_port = free_port(), free_port(), free_port()
        self.log = log
        given = {
            "model": model,
            "device": "cpu",
            "host": HOST,
            "grpc-port": self.grpc_port,
            "bootstrap-port": self.bootstrap_port,
            "metrics-port": self.metrics_port,
            "store-device-mib": 256,
        } | flags
        if given.get("tensor-parallel-size", 1) > 1:
            given.setdefault("dist-init-port", free_port())
        argv = [*command, "serve", *(f"--{name}={value}" for name, value in given.items())]
        self.process = start(argv, log)
        self._channel: grpc.Channel | None = None

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.bootstrap_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{HOST}:{self.metrics_port}"

    def ready(self) -> Self:
        """Wait for /readyz. Raises with the log if the worker ends first."""
        deadline = time.monotonic() + START_S
        while http(f"{self.metrics_url}/readyz")[0] != 200:
            if self.process.poll() is not None:
                raise RuntimeError(f"the worker ended with {self.process.returncode}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready within {START_S} s\n{self.log_tail()}")
            time.sleep(0.1)
        return self

    # --- what the gateway does

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            self._channel = grpc.insecure_channel(f"{HOST}:{self.grpc_port}", options=CHANNEL_OPTIONS)
        return self._channel

    @property
    def encoder(self) -> Any:
        return tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderStub(self.channel)

    @property
    def scheduler(self) -> Any:
        return tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(self.channel)

    def encode(self, request: Any, timeout_s: float = 30.0) -> Any:
        return self.encoder.Encode(request, timeout=timeout_s)

    # --- what is visible

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, labels included in the name."""
        status, text = http(f"{self.metrics_url}/metrics")
        assert status == 200, text
        samples = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def control(self, rank: int = 0) -> str:
        """Where a rank's control frames are to be sent."""
        status, text = http(f"http://{self.bootstrap}/route?engine_rank={rank}&target_dp_group=0")
        assert status == 200, text
        route = json.loads(text)
        return f"{route['rank_ip']}:{route['rank_port']}"

    def processes(self) -> list[psutil.Process]:
        """The supervisor and all its children."""
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def tcp_ports(self) -> set[int]:
        """Every TCP port that a process of the worker listens on."""
        return {
            connection.laddr.port
            for process in self.processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def run_dir(self) -> Path:
        """The folder of its ipc sockets."""
        for process in self.processes():
            found = re.search(r"--run-dir[= ](\S+)", " ".join(process.cmdline()))
            if found:
                return Path(found[1])
        raise LookupError("no process was given a run folder")

    def log_tail(self, n_bytes: int = 6000) -> str:
        return self.log.read_bytes()[-n_bytes:].decode("utf-8", "replace")

    # --- its end

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM and the exit code; killed when it does not end in time."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise RuntimeError(f"the worker did not end within {timeout_s} s\n{self.log_tail()}") from None
