"""What the SMG gateway makes of a published list: its rules, restated as code of our own.

Four ways lead into the gateway: a file, its command line, its API, and pods of a cluster. Each function
here returns the encode, prefill and decode workers that SMG 1.13 takes that way, or its refusal. They
hold by measurement, and `test_smg_rules` holds them against the real gateway.
"""

import ipaddress
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("regular", "prefill", "decode", "encode")
KEYS = ("id", "url", "worker_type", "bootstrap_port", "model_id", "kv_connector", "kv_role", "kv_engine_id")
DEFAULT_BOOTSTRAP_PORT = 8998
DEFAULT_POD_PORT = 80

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Worker:
    """``bootstrap_port`` is what prefill is handed; None for decode, which has none."""

    role: str
    url: str
    bootstrap_port: int | None


@dataclass(frozen=True)
class Refused:
    """Nothing is taken; ``why`` in the gateway's words."""

    why: str


Taken = frozenset[Worker] | Refused


# --- a file


def from_file(text: str) -> Taken:
    """``--discovery-provider file``: one bad entry refuses the whole file."""
    try:
        document = json.loads(text)
    except ValueError:
        return Refused("EOF while parsing")
    if not isinstance(document, dict):
        return Refused("expected struct ManifestVersion")
    if "version" not in document:
        return Refused("missing field `version`")
    version = document["version"]
    if type(version) is not int:
        return Refused("expected u64")
    if version != 1:
        return Refused(f"unsupported version {version}; this gateway reads version 1")
    for key in document:
        if key not in ("version", "workers"):
            return Refused(f"unknown field `{key}`, expected `version` or `workers`")
    if "workers" not in document:
        return Refused("missing field `workers`")
    return _from_entries(document["workers"])


def _from_entries(entries: Sequence[Object]) -> Taken:
    for entry in entries:
        for check in (_unknown_key, _bad_type):
            if (why := check(entry)) is not None:
                return Refused(why)
    taken: list[Worker] = []
    names: dict[str, int] = {}
    addresses: dict[str, str] = {}
    for i, entry in enumerate(entries):
        if (why := _bad_value(entry)) is not None:
            return Refused(f"workers[{i}]: {why}")
        url = _canonical(entry["url"])
        name = entry.get("id", url)
        if name in names:
            return Refused(f"workers[{i}]: duplicate id '{name}'")
        if url in addresses:
            written = entry["url"].rstrip("/")
            return Refused(f"workers[{i}]: '{name}' and '{addresses[url]}' name the same endpoint {written}")
        names[name] = i
        addresses[url] = name
        taken.append(_worker(entry["worker_type"], url, entry.get("bootstrap_port")))
    return frozenset(taken)


def _unknown_key(entry: Object) -> str | None:
    unknown = next((key for key in entry if key not in KEYS), None)
    if unknown is not None:
        return f"unknown field `{unknown}`, expected one of `id`, `url`"
    return None if "url" in entry else "missing field `url`"


def _bad_type(entry: Object) -> str | None:
    role, port = entry.get("worker_type", ROLES[0]), entry.get("bootstrap_port")
    if role not in ROLES:
        return f"unknown variant `{role}`, expected one of `regular`"
    if port is None:
        return None
    if type(port) is not int:
        return f'invalid type: string "{port}", expected u16'
    return None if 0 <= port <= 65535 else f"invalid value: integer `{port}`, expected u16"


def _bad_value(entry: Object) -> str | None:
    if entry.get("id") == "":
        return "id must not be empty"
    if not entry["url"]:
        return "invalid url: endpoint is empty"
    if "worker_type" not in entry:
        return "worker_type is required in encode-prefill-decode routing"
    if entry["worker_type"] == "decode" and entry.get("bootstrap_port") is not None:
        return "bootstrap_port applies only to encode and prefill workers, not decode"
    return None


def _canonical(url: str) -> str:
    scheme, found, rest = url.rstrip("/").partition("://")
    return f"{scheme.lower()}://{rest}" if found else f"grpc://{scheme}"


def _worker(role: str, url: str, port: int | None) -> Worker:
    if role == "decode":
        return Worker(role, url, None)
    return Worker(role, url, DEFAULT_BOOTSTRAP_PORT if port is None else port)


# --- a command line


def from_args(tokens: Sequence[str]) -> Taken:
    """``--encode URL [PORT]``, ``--prefill URL [PORT]``, ``--decode URL``; other flags are passed over.

    A port is taken only where the next token is not a flag.
    """
    taken = []
    for i, token in enumerate(tokens):
        role = token.removeprefix("--")
        if token.startswith("--") and role in ("encode", "prefill", "decode"):
            values = []
            for value in tokens[i + 1 : i + 3]:
                if value.startswith("--"):
                    break
                values.append(value)
            if not values:
                return Refused(f"argument {token}: expected at least one argument")
            port = values[1] if len(values) > 1 and role != "decode" else "none"
            if port != "none" and not port.isdecimal():
                return Refused(f"Invalid bootstrap port: {port}")
            taken.append(_worker(role, values[0], None if port == "none" else int(port)))
    return frozenset(taken)


# --- its API


def from_api(bodies: Iterable[Object]) -> Taken:
    """``POST /workers``, one body after another; refused when one of them is."""
    taken: dict[str, Worker] = {}
    for body in bodies:
        url = str(body["url"])
        if not url.startswith(("http://", "https://", "grpc://", "grpcs://", "ipc://")):
            return Refused("url must start with")
        if url in taken:
            return Refused(f"Worker already exists at URL {url}")
        if body.get("worker_type", ROLES[0]) not in ROLES:
            return Refused("unknown variant")
        taken[url] = _worker(body.get("worker_type", ROLES[0]), url, body.get("bootstrap_port"))
    return frozenset(taken.values())


# --- pods


@dataclass(frozen=True)
class Selector:
    """``--service-discovery-namespace`` and one of ``--{encode,prefill,decode}-selector``."""

    role: str
    namespace: str
    terms: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("EPD mode with service discovery requires non-empty selectors")

    @classmethod
    def from_flags(cls, flags: Sequence[str], role: str = "encode") -> "Selector":
        """Terms up to the next flag; one without "=" is dropped without a word, as SMG does."""
        place = flags.index(f"--{role}-selector") + 1
        terms = {}
        for token in flags[place:]:
            if token.startswith("--"):
                break
            key, found, value = token.partition("=")
            if found:
                terms[key] = value
        return cls(role, flags[flags.index("--service-discovery-namespace") + 1], terms)


def from_pods(pods: Iterable[Object], selector: Selector) -> Taken:
    """``--service-discovery``: pods that are Ready and have every term of the selector."""
    taken: set[Worker] = set()
    for pod in pods:
        meta, status = pod["metadata"], pod["status"]
        labels, notes = meta.get("labels", {}), meta.get("annotations", {})
        host = status.get("podIP")
        if (
            meta["namespace"] != selector.namespace
            or not selector.terms.items() <= labels.items()
            or meta.get("deletionTimestamp")
            or not host
            or status.get("phase") != "Running"
            or not _ready(status)
        ):
            continue
        ports = _ports(notes.get("smg.ai/worker-ports")) or [DEFAULT_POD_PORT]
        bootstraps = _ports(notes.get("sglang.ai/bootstrap-port")) or []
        aligned = len(bootstraps) == len(ports)
        for i, port in enumerate(ports):
            url = f"grpc://{bracketed(host)}:{port}"
            taken.add(_worker(selector.role, url, bootstraps[i] if aligned else None))
    return frozenset(taken)


def _ready(status: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))


def _ports(text: str | None) -> list[int]:
    """Junk or 0 anywhere, and the whole annotation counts for nothing."""
    parts = (text or "").split(",")
    good = all(part.isdecimal() and 0 < int(part) <= 65535 for part in parts)
    return [int(part) for part in parts] if good else []


def bracketed(host: str) -> str:
    return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
