"""A gateway and a prefill worker outside the cluster: they read the list, send pictures, check the rows."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from kubernetes.client.exceptions import ApiException
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc
from tests.cluster.operator_stage import Object, Pools
from tests.e2e.gateway import Picture, image_request
from tests.e2e.receiving import Receivers, Rows
from tests.e2e.running import CHANNEL_OPTIONS
from tests.peers.tokenspeed.remote import Remote

LOOK_S = 0.2
SEND_S = 0.2
ENCODE_TIMEOUT_S = 30.0


def addresses_of(worker: Object) -> set[str]:
    """Both (host, port) of an entry of the gateway's manifest."""
    address = worker["url"].removeprefix("grpc://")
    return {address, f"{address.rpartition(':')[0]}:{worker['bootstrap_port']}"}


class Sender:
    """Sends pictures to entries of the list as the gateway does, to be received by TokenSpeed's receiver."""

    def __init__(
        self,
        prefill: Remote,
        new_room: Callable[[], int],
        new_picture: Callable[[], Picture],
        direct: Callable[[Picture], Rows],
    ) -> None:
        self._prefill = prefill
        self._new_room = new_room
        self._new_picture = new_picture
        self._direct = direct

    def send(self, worker: Object, still: Callable[[], bool] = lambda: True) -> str | None:
        """One new picture; "" if its rows arrived as the tower makes them, else what happened.

        None: it was not sent, as ``still`` said at the last moment that it is too late.
        """
        address = worker["url"].removeprefix("grpc://")
        bootstrap = f"{address.rpartition(':')[0]}:{worker['bootstrap_port']}"
        room, picture = self._new_room(), self._new_picture()
        receivers = Receivers(self._prefill, bootstrap)
        receivers.ask(room, picture)
        try:
            if not still():
                return None
            with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                stub = tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderStub(channel)
                stub.Encode(image_request(room, picture), timeout=ENCODE_TIMEOUT_S)
            verdict = receivers.verdict(room)
            if verdict["status"] != "Success":
                return f"{verdict['status']}: {verdict['reason']}"
            return "" if receivers.digest(room) == self._direct(picture).digest else "other rows"
        except grpc.RpcError as error:
            return str(error)
        finally:
            receivers.forget(room)


@dataclass(frozen=True, slots=True)
class Look:
    """What was listed at a moment (monotonic)."""

    at: float
    workers: Mapping[str, Object]


@dataclass
class Published:
    """Follows the list of one pool. ``looks`` has each change and when it was seen first."""

    pools: Pools
    pool: str
    looks: list[Look] = field(default_factory=list)
    error: Exception | None = None

    @contextmanager
    def followed(self) -> Iterator["Published"]:
        ended = threading.Event()

        def follow() -> None:
            try:
                while not ended.wait(LOOK_S):
                    self.look()
            except Exception as error:  # noqa: BLE001 - raised below, in the test's own thread
                self.error = error

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join(10)
        if self.error is not None:
            raise self.error

    def look(self) -> None:
        try:
            workers = {worker["id"]: worker for worker in self.pools.workers(self.pool)}
        except (ApiException, KeyError):
            workers = {}  # no list yet, or no longer
        if not self.looks or self.looks[-1].workers != workers:
            self.looks.append(Look(time.monotonic(), workers))

    @property
    def now(self) -> Mapping[str, Object]:
        return self.looks[-1].workers if self.looks else {}

    def as_of(self, at: float) -> Mapping[str, Object]:
        """What was listed then."""
        seen = [look.workers for look in self.looks if look.at <= at]
        return seen[-1] if seen else {}

    def fewest_since(self, at: float) -> int:
        """The shortest list there was since then."""
        return min([len(self.as_of(at)), *(len(look.workers) for look in self.looks if look.at > at)])

    def gone_since(self, identity: str) -> float | None:
        """When the entry was last taken off; None while it is listed."""
        at = None
        for look in reversed(self.looks):
            if identity in look.workers:
                break
            at = look.at
        return at

    def unlisted_at(self, identity: str, since: float) -> float | None:
        """When the entry was first missing after ``since``."""
        later = (look for look in self.looks if look.at > since)
        return next((look.at for look in later if identity not in look.workers), None)

    def reused_addresses(self) -> list[str]:
        """Every (host, port) that was published under more than one id."""
        entries = {name: worker for look in self.looks for name, worker in look.workers.items()}
        counts = Counter(address for worker in entries.values() for address in addresses_of(worker))
        return [address for address, times in counts.items() if times > 1]


@dataclass
class Traffic:
    """Sends without end to what was listed ``lag_s`` ago, as a gateway that hears of changes late.

    Nothing is sent later than ``within_s`` after a withdrawal, however slow this machine is.
    """

    sender: Sender
    published: Published
    lag_s: float
    within_s: float
    sent: int = 0
    sent_to_withdrawn: int = 0
    failures: list[str] = field(default_factory=list)
    error: Exception | None = None

    @contextmanager
    def flowing(self) -> Iterator["Traffic"]:
        ended = threading.Event()

        def flow() -> None:
            try:
                while not ended.wait(SEND_S):
                    for name, worker in self.published.as_of(time.monotonic() - self.lag_s).items():
                        self._send(name, worker)
            except Exception as error:  # noqa: BLE001 - raised below, in the test's own thread
                self.error = error

        thread = threading.Thread(target=flow, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join(60)
        if self.error is not None:
            raise self.error

    def _send(self, name: str, worker: dict[str, Any]) -> None:
        def still() -> bool:
            since = self.published.gone_since(name)
            return since is None or time.monotonic() < since + self.within_s

        withdrawn = self.published.gone_since(name) is not None
        trouble = self.sender.send(worker, still)
        if trouble is None:
            return
        self.sent += 1
        self.sent_to_withdrawn += withdrawn
        if trouble:
            self.failures.append(f"{name}{' (withdrawn)' if withdrawn else ''}: {trouble}")
