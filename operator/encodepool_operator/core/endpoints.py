"""Who is listed, and the published documents, all from one sorted list.

The rules come from what SMG 1.13 does with a list: one bad entry rejects the whole file, an absent
port gets a wrong default, a worker that comes back within 5 s of its removal is lost for up to 60 s.
So every entry is complete, each is checked by itself before it is listed, and a group that was
withdrawn is not listed again for ``RELIST_S``.
"""

import ipaddress
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from encodepool_operator.api import labels, names
from encodepool_operator.api.types import Spec

from .group import GroupView
from .snapshot import PodFacts, Publication

RELIST_S = 10.0
"""The same URL is not listed again within this time after a withdrawal."""

WORKERS = "workers.json"
ENDPOINTS = "endpoints.json"
SMG_WORKERS = "smg-workers.json"
SMG_ARGS = "smg-args"

WORKER_KEYS = ("id", "url", "worker_type", "bootstrap_port", "model_id")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One group in the list. ``host`` is "" while there is no leader with an address.

    ``spec`` parts (``model``, ``tensor_parallel_size``) are those of the group's own revision.
    """

    id: str
    group: int
    incarnation: int
    host: str
    grpc_port: int
    bootstrap_port: int
    model: str
    tensor_parallel_size: int
    ready: bool
    draining: bool
    reason: str
    node: str
    zone: str

    @property
    def url(self) -> str:
        if not self.host:
            return ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"grpc://{host}:{self.grpc_port}"


def address(pod: PodFacts, ip_family: str) -> str:
    """The pod's address of the wanted family ("" = its first), or "" when it has none.

    Only IP addresses count: gateways and prefill workers cache by host, so a name would hide a
    change of address from them.
    """
    return _address(pod.ips, ip_family)


@lru_cache(maxsize=4096)
def _address(ips: tuple[str, ...], ip_family: str) -> str:
    for ip in ips:
        try:
            version = ipaddress.ip_address(ip).version
        except ValueError:
            continue
        if ip_family in ("", f"IPv{version}"):
            return ip
    return ""


def relist_at(view: GroupView) -> float | None:
    """When the group may be listed again; None when it was never withdrawn in this incarnation."""
    if view.record is None or view.record.withdrawn_at is None:
        return None
    return view.record.withdrawn_at + RELIST_S


def routable(view: GroupView, spec: Spec, now: float) -> bool:
    """Whether the group may be in the list: proven ready, with an address, not just withdrawn."""
    leader = view.leader
    if not view.ready or leader is None or not address(leader, spec.network.ip_family):
        return False
    again = relist_at(view)
    return again is None or now >= again


def publication(view: GroupView, spec: Spec) -> Publication | None:
    """What the leader's label and annotations say when the group is published."""
    if view.record is None:
        return None
    ports = view.record.ports
    return Publication(ports.bootstrap, ports.grpc, names.served_model_name(spec))


def endpoint(
    namespace: str, pool: str, view: GroupView, spec: Spec, *, ready: bool, draining: bool, reason: str
) -> Endpoint | None:
    """The group's entry; None when only pods are left of it."""
    record = view.record
    if record is None:
        return None
    leader = view.leader
    return Endpoint(
        id=names.endpoint_id(namespace, pool, view.index, record.incarnation),
        group=view.index,
        incarnation=record.incarnation,
        host=address(leader, spec.network.ip_family) if leader else "",
        grpc_port=record.ports.grpc,
        bootstrap_port=record.ports.bootstrap,
        model=names.served_model_name(spec),
        tensor_parallel_size=spec.tensor_parallel_size,
        ready=ready,
        draining=draining,
        reason="" if ready else reason,
        node=leader.node if leader else "",
        zone=leader.zone if leader else "",
    )


@dataclass(frozen=True, slots=True)
class Lines:
    """The JSON of one entry in each document; the last three are empty unless it is listed."""

    id: str
    endpoint: str
    worker: str = ""
    smg_worker: str = ""
    smg_args: str = ""


def lines_of(pool: str, entry: Endpoint) -> Lines:
    described = _json(_entry(entry))
    if not entry.ready:
        return Lines(entry.id, described)
    return Lines(
        entry.id,
        described,
        _json(_worker(entry)),
        _json(_body(pool, entry)),
        f"--encode {entry.url} {entry.bootstrap_port}",
    )


def documents(namespace: str, pool: str, model: str, entries: Sequence[Lines]) -> dict[str, str]:
    """Every published file, by name, with the entries in the given order.

    One entry stands on one line, so that a diff of two lists shows the groups that differ.
    """
    head = {
        "apiVersion": labels.API,
        "kind": labels.ENDPOINT_LIST_KIND,
        "namespace": namespace,
        "pool": pool,
        "model": model,
    }
    listed = [entry for entry in entries if entry.worker]
    return {
        WORKERS: f'{{"version":1,"workers":{_items(entry.worker for entry in listed)}}}\n',
        ENDPOINTS: f'{_json(head)[:-1]},"endpoints":{_items(entry.endpoint for entry in entries)}}}\n',
        SMG_WORKERS: f"{_items(entry.smg_worker for entry in listed)}\n",
        SMG_ARGS: "".join(f"{entry.smg_args}\n" for entry in listed),
    }


def listed_ids(published: Mapping[str, str] | None) -> frozenset[str]:
    """Ids in the list that is published now; empty when there is none or somebody broke it."""
    try:
        workers = json.loads((published or {})[WORKERS])["workers"]
        return frozenset(str(worker["id"]) for worker in workers)
    except (KeyError, TypeError, ValueError):
        return frozenset()


def manifest_problems(text: str) -> list[str]:
    """Why SMG would reject the file, or take an entry in a way that is not meant."""
    try:
        manifest = json.loads(text)
    except ValueError as exc:
        return [f"not JSON: {exc}"]
    if not isinstance(manifest, dict) or set(manifest) != {"version", "workers"}:
        return ["must have exactly the keys version and workers"]
    if manifest["version"] != 1 or isinstance(manifest["version"], bool):
        return [f"version must be 1, is {manifest['version']!r}"]
    if not isinstance(manifest["workers"], list):
        return ["workers must be a list"]
    problems: list[str] = []
    seen: dict[str, int] = {}
    for i, worker in enumerate(manifest["workers"]):
        problems.extend(f"workers[{i}]: {problem}" for problem in _worker_problems(worker))
        if isinstance(worker, dict):
            for key in ("id", "url"):
                value = f"{key} {worker.get(key)}"
                if value in seen:
                    problems.append(f"workers[{i}]: same {key} as workers[{seen[value]}]")
                seen[value] = i
    return problems


def _worker_problems(worker: Any) -> list[str]:
    if not isinstance(worker, dict) or set(worker) != set(WORKER_KEYS):
        return [f"must have exactly the keys {', '.join(WORKER_KEYS)}"]
    problems = [f"{key} must be a text" for key in ("id", "url", "model_id") if not _text(worker[key])]
    if worker["worker_type"] != "encode":
        problems.append(f"worker_type must be encode, is {worker['worker_type']!r}")
    if not _port(worker["bootstrap_port"]):
        problems.append(f"bootstrap_port must be 1 to 65535, is {worker['bootstrap_port']!r}")
    if _text(worker["url"]) and not _usable_url(worker["url"]):
        problems.append(f"url must be grpc://IP:PORT, is {worker['url']!r}")
    return problems


def _usable_url(url: str) -> bool:
    host, colon, port = url.removeprefix("grpc://").rpartition(":")
    if not url.startswith("grpc://") or not colon or not port.isdecimal() or not _port(int(port)):
        return False
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        version = ipaddress.ip_address(host[1:-1] if bracketed else host).version
    except ValueError:
        return False
    return bracketed == (version == 6)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _port(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535


def _worker(entry: Endpoint) -> dict[str, Any]:
    return {
        "id": entry.id,
        "url": entry.url,
        "worker_type": "encode",
        "bootstrap_port": entry.bootstrap_port,
        "model_id": entry.model,
    }


def _entry(entry: Endpoint) -> dict[str, Any]:
    return {
        "id": entry.id,
        "group": entry.group,
        "incarnation": entry.incarnation,
        "url": entry.url,
        "host": entry.host,
        "grpcPort": entry.grpc_port,
        "bootstrapHost": entry.host,
        "bootstrapPort": entry.bootstrap_port,
        "tensorParallelSize": entry.tensor_parallel_size,
        "ready": entry.ready,
        "draining": entry.draining,
        "reason": entry.reason,
        "node": entry.node,
        "zone": entry.zone,
    }


def _body(pool: str, entry: Endpoint) -> dict[str, Any]:
    """A body for ``POST /workers``. It never has the label smg.ai/pod-uid: SMG's own discovery would
    take the worker for one of its own and remove it."""
    return {
        "url": entry.url,
        "worker_type": "encode",
        "connection_mode": "grpc",
        "runtime_type": "tokenspeed",
        "bootstrap_port": entry.bootstrap_port,
        "labels": {
            "served_model_name": entry.model,
            labels.POOL: pool,
            labels.GROUP: str(entry.group),
        },
    }


def _items(items: Iterable[str]) -> str:
    joined = ",".join(f"\n{item}" for item in items)
    return f"[{joined}\n]" if joined else "[]"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
