"""Tells the bootstrap server where this rank listens, until it has been heard."""

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from ..errors import WorkerError
from ..logs import get_logger
from ..wire.bootstrap import ROUTE_PATH, RankRegistration, encode_registration
from .control_socket import bracketed
from .threads import Crash, start_thread

RETRY_S = 0.2
TRY_TIMEOUT_S = 5.0
LOG_EVERY_TRIES = 50


class Registrar:
    """One PUT /route that succeeds; ``on_routed`` is called once, from the thread.

    It tries for as long as the process lives: the frontend may still be starting, and if it never
    comes the supervisor ends both. A refusal (4xx) is final and crashes.
    """

    def __init__(
        self,
        host: str,
        bootstrap_port: int,
        registration: RankRegistration,
        on_routed: Callable[[], None],
        crash: Crash,
    ) -> None:
        self._url = f"http://{bracketed(host)}:{bootstrap_port}{ROUTE_PATH}"
        self._registration = registration
        self._on_routed = on_routed
        self._stopped = threading.Event()
        # The environment's proxies are for the hub, not for our own machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._thread = start_thread("registration", self._run, crash)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        tries = 0
        while not self._stopped.is_set():
            problem = self._put()
            if problem is None:
                get_logger().info("registered", url=self._url, rank=self._registration.rank)
                self._on_routed()
                return
            tries += 1
            if tries % LOG_EVERY_TRIES == 0:
                get_logger().warning("not registered yet", url=self._url, problem=problem, tries=tries)
            self._stopped.wait(RETRY_S)

    def _put(self) -> str | None:
        """None when accepted, else what is in the way. Raises WorkerError when it will stay."""
        request = urllib.request.Request(
            self._url,
            encode_registration(self._registration),
            {"Content-Type": "application/json"},
            method="PUT",
        )
        try:
            with self._opener.open(request, timeout=TRY_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            with error:
                if 400 <= error.code < 500:
                    text = error.read(200).decode(errors="replace")
                    raise WorkerError(f"{self._url} refused this rank: {error.code} {text}") from error
                return f"HTTP {error.code}"
        except (OSError, http.client.HTTPException) as error:
            return str(error)
