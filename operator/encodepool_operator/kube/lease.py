"""One of several replicas acts at a time: the holder of a Lease.

A holder renews every ``retry_s``. Another replica takes the Lease when it has been released, or when it
has seen it unchanged for as long as it is valid, by its own clock: the clocks of two machines are never
compared. A holder that could not renew for ``deadline_s`` (shorter than the validity) holds it no more.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from .client import Client
from .errors import ApiError, KubeError
from .kinds import LEASE

VALID_S = 15
DEADLINE_S = 10.0
RENEW_S = 2.0
WATCH_S = 1.0
"""How often a replica that waits looks at the Lease; it also is the delay after a release."""

log = structlog.get_logger(__name__)


class LeaseLost(Exception):
    """It was ours and is not any more: nothing may be written from now on."""


@dataclass(frozen=True, slots=True)
class LeaseName:
    namespace: str
    name: str
    identity: str


class Lease:
    """``held`` is an event that is set as long as the Lease is ours."""

    def __init__(
        self, client: Client, name: LeaseName, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._name = name
        self._clock = clock
        self._seen: dict[str, Any] | None = None
        self._seen_at_s = 0.0
        self._renewed_at_s: float | None = None
        self.held = asyncio.Event()
        self.looked_at_s = clock()

    def is_held(self) -> bool:
        """Whether a write may start now."""
        renewed = self._renewed_at_s
        return renewed is not None and self._clock() < renewed + DEADLINE_S

    async def run(self) -> None:
        """Take the Lease and keep it. Ends only with LeaseLost, or by being cancelled."""
        while True:
            try:
                async with asyncio.timeout(DEADLINE_S / 2):
                    await self._turn()
            except (KubeError, TimeoutError) as error:
                log.warning("the lease could not be read or written", why=str(error) or "no answer in time")
            if self._renewed_at_s is not None and not self.is_held():
                self.held.clear()
                raise LeaseLost(f"lease {self._name.name} was not renewed for {DEADLINE_S:.0f} s")
            await asyncio.sleep(RENEW_S if self.is_held() else WATCH_S)

    async def release(self) -> None:
        """Let another replica take it at once. Never raises."""
        self.held.clear()
        if self._renewed_at_s is None:
            return
        self._renewed_at_s = None
        try:
            async with asyncio.timeout(DEADLINE_S / 2):
                # What was seen last may be another's, or older than our last renewal, whose answer was
                # not waited for.
                await self._look()
                if self._seen is None or self._seen["spec"].get("holderIdentity") != self._name.identity:
                    return
                spec = {**self._seen["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                await self._client.replace(LEASE, {**self._seen, "spec": spec})
        except (KubeError, TimeoutError) as error:
            log.warning("the lease was not released, it runs out by itself", why=str(error))
        else:
            log.info("lease released")

    async def _turn(self) -> None:
        """Renew, take, or look."""
        began_s = self._clock()
        if self._renewed_at_s is None:
            await self._look()
            if not self._is_free():
                return
        try:
            wanted = self._wanted()
            if self._seen is None:
                self._note(await self._client.create(LEASE, wanted, tries=1))
            else:
                self._note(await self._client.replace(LEASE, wanted))
        except ApiError as error:
            if not error.changed and not error.gone:
                raise
            await self._contested()
            return
        if self._renewed_at_s is None:
            log.info("lease taken", lease=f"{self._name.namespace}/{self._name.name}")
        self._renewed_at_s = began_s
        self.held.set()

    async def _contested(self) -> None:
        """Somebody wrote it between our looks: only if that was not us it is lost."""
        await self._look()
        holder = self._seen["spec"].get("holderIdentity") if self._seen is not None else ""
        if self._renewed_at_s is not None and holder not in ("", self._name.identity):
            self.held.clear()
            raise LeaseLost(f"lease {self._name.name} was taken by {holder}")

    async def _look(self) -> None:
        try:
            self._note(await self._client.get(LEASE, self._name.namespace, self._name.name))
        except ApiError as error:
            if not error.gone:
                raise
            self._seen = None

    def _note(self, lease: dict[str, Any]) -> None:
        self.looked_at_s = self._clock()
        before = self._seen["metadata"]["resourceVersion"] if self._seen is not None else None
        if lease["metadata"]["resourceVersion"] != before:
            self._seen_at_s = self._clock()
        self._seen = lease

    def _is_free(self) -> bool:
        if self._seen is None:
            return True
        spec = self._seen.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        valid_s = float(spec.get("leaseDurationSeconds") or VALID_S)
        return holder in ("", self._name.identity) or self._clock() >= self._seen_at_s + valid_s

    def _wanted(self) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = dict(self._seen["spec"]) if self._seen is not None else {}
        if spec.get("holderIdentity") != self._name.identity:
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        spec |= {
            "holderIdentity": self._name.identity,
            "leaseDurationSeconds": VALID_S,
            "renewTime": now,
        }
        metadata = (
            self._seen["metadata"]
            if self._seen is not None
            else {"namespace": self._name.namespace, "name": self._name.name}
        )
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": metadata,
            "spec": spec,
        }
