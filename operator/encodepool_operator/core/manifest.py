"""SMG's full manifest: the lists of pools joined with the prefill and decode workers of a deployment.

What SMG 1.13 takes, and what it takes although it cannot be meant, was measured: one bad entry rejects
the whole file and the last good list stays in force, unseen. So everything is checked before it is
written, and a manifest with a problem is never joined in part.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .endpoints import manifest_problems

ROLES = ("encode", "prefill", "decode")
TEXTS = ("id", "url", "model_id", "kv_connector", "kv_role", "kv_engine_id")
KEYS = ("id", "url", "worker_type", "bootstrap_port", "model_id", "kv_connector", "kv_role", "kv_engine_id")
"""Any other key makes SMG reject the file. Workers are written with their keys in this order."""

OURS = "encode"

Worker = Mapping[str, Any]


class ManifestProblems(ValueError):
    """A file that must not be used. ``problems`` name the place, in the file's own terms."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Merged:
    """``text`` is the file; ``notes`` are about what is legal and yet probably not meant."""

    text: str
    notes: tuple[str, ...]

    @property
    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.text)["workers"]
        return found


def read_list(text: str) -> list[Worker]:
    """The workers of a pool's ``workers.json``. Raises ManifestProblems."""
    workers = read_manifest(text)
    problems = manifest_problems(text)
    if problems:
        raise ManifestProblems(problems)
    return workers


def read_manifest(text: str) -> list[Worker]:
    """The workers of a manifest with any roles, as SMG takes it. Raises ManifestProblems.

    A key that is null counts as left out.
    """
    try:
        manifest = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise ManifestProblems([f"not JSON: {error}"]) from error
    if not isinstance(manifest, dict) or set(manifest) != {"version", "workers"}:
        raise ManifestProblems(["must have exactly the keys version and workers"])
    version, workers = manifest["version"], manifest["workers"]
    if type(version) is not int or version != 1:
        raise ManifestProblems([f"version must be 1, is {version!r}"])
    if not isinstance(workers, list):
        raise ManifestProblems(["workers must be a list"])
    problems = [f"workers[{i}]: {problem}" for i, one in enumerate(workers) for problem in _problems(one)]
    if problems:
        raise ManifestProblems(problems)
    known = [{key: worker[key] for key in KEYS if worker.get(key) is not None} for worker in workers]
    repeated = _repeated([(f"workers[{i}]", worker) for i, worker in enumerate(known)])
    if repeated:
        raise ManifestProblems(repeated)
    return list(known)


def merge(base: Sequence[Worker], lists: Sequence[tuple[str, Sequence[Worker]]]) -> Merged:
    """Prefill and decode workers of ``base``, then the lists in their order, each as it is.

    Encode workers of ``base`` are left out, as the lists say who encodes: so a merged file may be the
    base of the next merge. ``lists`` are (source, workers). Raises ManifestProblems where two workers
    have one id or one address.
    """
    others = [worker for worker in base if worker["worker_type"] != OURS]
    named = [("the manifest", worker) for worker in others]
    named += [(source, worker) for source, workers in lists for worker in workers]
    repeated = _repeated(named)
    if repeated:
        raise ManifestProblems(repeated)
    workers = [worker for _, worker in named]
    joined = ",".join(f"\n{json.dumps(w, separators=(',', ':'), ensure_ascii=False)}" for w in workers)
    text = f'{{"version":1,"workers":[{joined}\n]}}\n' if joined else '{"version":1,"workers":[]}\n'
    return Merged(text, tuple(_notes(len(base) - len(others), workers)))


def _notes(left_out: int, workers: Sequence[Worker]) -> list[str]:
    notes = []
    if left_out:
        notes.append(f"{left_out} encode workers of the manifest are left out: the lists say who encodes")
    prefill = [worker.get("model_id") for worker in workers if worker["worker_type"] == "prefill"]
    if prefill and None not in prefill:
        models = {worker["model_id"] for worker in workers if worker["worker_type"] == OURS}
        for model in sorted(models - set(prefill)):
            notes.append(f"no prefill worker serves model {model!r}: the gateway will not use its encoders")
    return notes


def _repeated(named: Sequence[tuple[str, Worker]]) -> list[str]:
    seen: dict[str, str] = {}
    out = []
    for source, worker in named:
        # To SMG the URL is the id of a worker that has none.
        for what, value in (("id", worker.get("id", worker["url"])), ("address", endpoint(worker["url"]))):
            key = f"{what} {value}"
            if key in seen:
                out.append(f"{source}: {key} is also that of a worker of {seen[key]}")
            seen.setdefault(key, source)
    return out


def endpoint(url: str) -> str:
    """What SMG takes for the same address, however it is written. "" if it is none."""
    scheme, found, rest = url.partition("://")
    if not found:
        scheme, rest = "grpc", url
    if scheme.lower() != "grpc":
        return ""
    try:
        parts = urlsplit(f"grpc://{rest}")
        port = parts.port
    except ValueError:
        return ""
    bare = not (parts.path.rstrip("/") or parts.query or parts.fragment or "@" in rest or "?" in rest)
    if not bare or not parts.hostname or not port or any(c.isspace() for c in url):
        return ""
    return f"{parts.hostname}:{port}"


def _problems(worker: Any) -> list[str]:
    if not isinstance(worker, dict):
        return ["must be an object"]
    unknown = sorted(set(worker) - set(KEYS))
    problems = [f"unknown key {key}" for key in unknown]
    problems += [
        f"{key} must be a text" for key in TEXTS if worker.get(key) is not None and not _is_text(worker[key])
    ]
    url, role, port = worker.get("url"), worker.get("worker_type"), worker.get("bootstrap_port")
    if url is None:
        problems.append("url is required")
    elif isinstance(url, str) and url and not endpoint(url):
        problems.append(f"url must be grpc://HOST:PORT, is {url!r}")
    if role not in ROLES:
        problems.append(f"worker_type must be one of {', '.join(ROLES)}, is {role!r}")
    if port is not None:
        if type(port) is not int or not 1 <= port <= 65535:
            problems.append(f"bootstrap_port must be 1 to 65535, is {port!r}")
        if role == "decode":
            problems.append("bootstrap_port applies only to encode and prefill workers")
    if role == OURS:
        # Absent, SMG would make it port 8998, and use the worker for no model.
        problems += [
            f"{key} is required" for key in ("bootstrap_port", "model_id") if worker.get(key) is None
        ]
    return problems


def _is_text(value: Any) -> bool:
    """Printable: half a surrogate pair is legal in JSON for Python, and not for SMG."""
    return isinstance(value, str) and bool(value) and value.isprintable()


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in {k for k, _ in pairs[:i]})
        raise ValueError(f"the key {twice!r} stands there twice")
    return out
