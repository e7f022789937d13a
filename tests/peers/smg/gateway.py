"""The real SMG gateway as a process on loopback, its worker list, and chat requests through it."""

import base64
import http.client
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HOST = "127.0.0.1"
READY_S = 60.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PROMPT = "what is in the picture?"


def file_discovery(manifest: Path) -> tuple[str, ...]:
    return ("--discovery-provider", "file", "--discovery-file", str(manifest))


@lru_cache(maxsize=256)
def picture(seed: int, side: int = 256) -> bytes:
    """A PNG that differs from every other seed's all over. SMG does not scale the default size."""
    blocks = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize((side, side), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


@dataclass(frozen=True)
class Answer:
    """What the client got; ``began`` and ``ended`` are monotonic."""

    status: int
    body: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def text(self) -> str:
        return str(json.loads(self.body)["choices"][0]["message"]["content"])

    @property
    def request_id(self) -> str:
        """Prefill knows the request by it, too."""
        return str(json.loads(self.body)["id"])


class Reached:
    """A gateway that runs somewhere: its worker list, and requests through it."""

    def __init__(self, host: str, port: int, served_name: str) -> None:
        self.host, self.port = host, port
        self.served_name = served_name

    def request(
        self, method: str, path: str, body: object = None, timeout_s: float = 60.0
    ) -> tuple[int, str]:
        """Status and text of an answer; (0, reason) without one."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    def workers(self) -> list[dict[str, Any]]:
        """What it lists; empty while it does not answer."""
        status, body = self.request("GET", "/workers", timeout_s=5)
        workers: list[dict[str, Any]] = json.loads(body)["workers"] if status == 200 else []
        return workers

    def encode_workers(self) -> set[tuple[str, int | None]]:
        """(url, bootstrap port) of each encode worker that it may send images to."""
        return {
            (worker["url"], worker.get("bootstrap_port"))
            for worker in self.workers()
            if worker["worker_type"] == "encode" and worker["status"] == "ready"
        }

    def wait_workers(self, wanted: set[tuple[str, int | None]], timeout_s: float = READY_S) -> None:
        """Until exactly these encode workers, a prefill and a decode are ready; raises RuntimeError."""
        deadline = time.monotonic() + timeout_s
        while True:
            roles = {worker["worker_type"] for worker in self.workers() if worker["status"] == "ready"}
            if self.encode_workers() == wanted and {"prefill", "decode"} <= roles:
                return
            if not self.runs():
                raise RuntimeError(f"the gateway has ended\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not so within {timeout_s} s: {self.workers()}\n{self.log_tail()}")
            time.sleep(0.05)

    def chat(self, pictures: Sequence[bytes], timeout_s: float = 60.0) -> Answer:
        """One chat completion with these PNGs, in their order."""
        content: list[dict[str, Any]] = [
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"},
            }
            for png in pictures
        ]
        content.append({"type": "text", "text": PROMPT})
        body = {
            "model": self.served_name,
            "max_tokens": 16,
            "messages": [{"role": "user", "content": content}],
        }
        began = time.monotonic()
        status, text = self.request("POST", "/v1/chat/completions", body, timeout_s)
        return Answer(status, text, began, time.monotonic())

    def runs(self) -> bool:
        return True

    def log_tail(self) -> str:
        return ""


class Gateway(Reached):
    """One ``smg launch`` in encode, prefill, decode mode; ``flags`` say how it finds its workers."""

    def __init__(
        self,
        spawn: Callable[..., subprocess.Popen[bytes]],
        free_port: Callable[[], int],
        model: Path,
        served_name: str,
        log: Path,
        flags: Sequence[str],
    ) -> None:
        super().__init__(HOST, free_port(), served_name)
        self.log = log
        argv = [
            sys.executable, "-m", "smg", "launch", "--host", HOST, "--port", str(self.port),
            "--prometheus-host", HOST, "--prometheus-port", str(free_port()),
            "--epd-disaggregation", "--model-path", str(model), *flags,
        ]  # fmt: skip
        self.process = spawn(argv, log)

    def runs(self) -> bool:
        return self.process.poll() is None

    def log_lines(self, pattern: str) -> list[str]:
        text = COLOURS.sub("", self.log.read_text(errors="replace"))
        return [line for line in text.splitlines() if re.search(pattern, line)]

    def log_tail(self) -> str:
        return "\n".join(self.log_lines("")[-40:])

    def stop(self) -> None:
        """At once: SIGTERM would wait for connections that nobody closes, and there is nothing to keep."""
        self.process.kill()
        self.process.wait(10)
