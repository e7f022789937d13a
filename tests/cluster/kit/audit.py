"""The API server's audit log: who asked for what since when."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
FLUSH_TIMEOUT_S = 10.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as the API server saw it.

    ``at`` is when it arrived, in UTC. ``code`` is the HTTP status; that of a watch that still runs
    is its first answer. ``group`` is "" for the core group; resource and name are "" for requests
    that name none, such as /version. ``user`` of a service account is
    "system:serviceaccount:NAMESPACE:NAME".
    """

    id: str
    at: datetime
    user: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    uri: str
    user_agent: str

    @property
    def writes(self) -> bool:
        return self.verb in WRITES

    @property
    def dry_run(self) -> bool:
        return "dryRun=All" in self.uri


def now() -> datetime:
    """A time to give to ``AuditLog.since``; the API server reads the same clock."""
    return datetime.now(UTC)


class AuditLog:
    """Reads the log as it grows. ``ask`` sends a GET with the given path as the administrator."""

    def __init__(self, path: Path, ask: Callable[[str], Any]) -> None:
        self._path = path
        self._ask = ask
        self._offset = 0
        self._requests: dict[str, Asked] = {}

    def since(self, at: datetime) -> list[Asked]:
        """All requests that arrived at ``at`` or later and were answered by now, in this order.

        It asks a question of its own and waits until that one is in the log: what ended before is
        in it, too. Its own questions are left out.
        """
        mark = uuid.uuid4().hex
        self._ask(f"/version?audit={mark}")
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        while not self._read(mark):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self._path} does not show a request of {FLUSH_TIMEOUT_S} s ago")
            time.sleep(POLL_S)
        found = [request for request in self._requests.values() if request.at >= at]
        return sorted(found, key=lambda request: request.at)

    def _read(self, mark: str) -> bool:
        """Take in the complete new lines; True once the one with ``mark`` has been among them."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        seen = False
        for line in complete.splitlines():
            request = _parse(json.loads(line))
            if request.uri.startswith("/version?audit="):
                seen = seen or request.uri.endswith(mark)
            else:
                # The end of a watch replaces its begin.
                self._requests[request.id] = request
        return seen


def _parse(event: dict[str, Any]) -> Asked:
    about = event.get("objectRef", {})
    return Asked(
        id=event["auditID"],
        at=datetime.fromisoformat(event["requestReceivedTimestamp"]),
        user=event["user"].get("username", ""),
        verb=event["verb"],
        group=about.get("apiGroup", ""),
        resource=about.get("resource", ""),
        subresource=about.get("subresource", ""),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        uri=event["requestURI"],
        user_agent=event.get("userAgent", ""),
    )
