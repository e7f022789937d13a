"""A Pod as the API server shows it becomes ``PodFacts``: pure functions over the JSON."""

from collections.abc import Mapping
from typing import Any

from encodepool_operator.api import labels
from encodepool_operator.core.record import MESSAGE_LIMIT_BYTES, seconds, shortened
from encodepool_operator.core.render import leader
from encodepool_operator.core.snapshot import ContainerFailure, PodFacts, PodPhase

Object = Mapping[str, Any]

ZONE = "topology.kubernetes.io/zone"
"""The API server copies it from the node to the pod since Kubernetes 1.35; before, the zone is unknown."""

DISRUPTED = ("Evicted", "Preempting", "Preempted", "NodeShutdown", "Terminated", "NodeLost", "Shutdown")
"""``status.reason`` of pods that the node or the cluster ended, not their own container."""

NOT_WORTH_TELLING = ("ContainerCreating", "PodInitializing", "")
WAITING_LIMIT = 200
SIGNALLED = 128
"""Exit codes above this one are of a signal."""

KEPT_ANNOTATIONS = (labels.BOOTSTRAP_PORT, labels.WORKER_PORTS, labels.MODEL_ID, labels.PUBLISHED_AT)


def trim(pod: Object) -> Object:
    """The parts of a pod that ``facts`` and the cache read."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations = meta.get("annotations") or {}
    kept = {key: meta[key] for key in META if key in meta}
    kept["annotations"] = {key: annotations[key] for key in KEPT_ANNOTATIONS if key in annotations}
    return {
        "metadata": kept,
        "spec": {"nodeName": spec.get("nodeName", "")},
        "status": {
            "phase": status.get("phase", ""),
            "reason": status.get("reason", ""),
            "podIPs": status.get("podIPs") or (),
            "conditions": [c for c in status.get("conditions") or () if c.get("type") in CONDITIONS],
            "containerStatuses": [
                c for c in status.get("containerStatuses") or () if c.get("name") == labels.CONTAINER
            ],
        },
    }


META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "labels",
    "ownerReferences",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
CONDITIONS = ("Ready", "PodScheduled", "DisruptionTarget")


def facts(pod: Object) -> PodFacts | None:
    """None for a pod whose labels do not say which member of which start it is."""
    meta, status = pod["metadata"], pod.get("status") or {}
    marks: Mapping[str, str] = meta.get("labels") or {}
    index = _whole(marks.get(labels.POD_INDEX) or meta["name"].rpartition("-")[2])
    incarnation = _whole(marks.get(labels.INCARNATION))
    if index is None or incarnation is None:
        return None
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    container: Object = next(
        (c for c in status.get("containerStatuses") or () if c.get("name") == labels.CONTAINER), {}
    )
    terminating = _terminating_since(meta)
    ready = conditions.get("Ready", {})
    state, last = container.get("state") or {}, container.get("lastState") or {}
    return PodFacts(
        name=meta["name"],
        uid=meta["uid"],
        index=index,
        incarnation=incarnation,
        phase=_phase(status),
        ips=tuple(str(ip["ip"]) for ip in status.get("podIPs") or () if ip.get("ip")),
        node=(pod.get("spec") or {}).get("nodeName") or "",
        zone=marks.get(ZONE, ""),
        launched=any(part in where for where in (state, last) for part in ("running", "terminated")),
        started=bool(container.get("started")) and "running" in state,
        ready=ready.get("status") == "True" and terminating is None,
        ready_changed_at=_time(ready.get("lastTransitionTime")),
        restart_count=int(container.get("restartCount") or 0),
        failure=_failure(state, last),
        disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True"
        or status.get("reason") in DISRUPTED,
        terminating_since=terminating,
        waiting=_waiting(conditions.get("PodScheduled", {}), state.get("waiting") or {}),
        publication=leader.read(marks, meta.get("annotations") or {}),
        version=str(meta.get("resourceVersion", "")),
    )


def _whole(text: str | None) -> int | None:
    try:
        number = int(text) if text is not None else None
    except ValueError:
        return None
    return number if number is not None and number >= 0 else None


def _time(text: str | None) -> float | None:
    try:
        return seconds(text) if text else None
    except ValueError:
        return None


def _phase(status: Object) -> PodPhase:
    try:
        return PodPhase(status.get("phase") or "Pending")
    except ValueError:  # Unknown: the node does not answer, so nothing has been seen to end
        return PodPhase.RUNNING


def _terminating_since(meta: Object) -> float | None:
    """``deletionTimestamp`` is when the grace period ends, not when it began."""
    ends = _time(meta.get("deletionTimestamp"))
    return None if ends is None else ends - float(meta.get("deletionGracePeriodSeconds") or 0)


def _failure(state: Object, last: Object) -> ContainerFailure | None:
    ended = state.get("terminated") or last.get("terminated")
    if not ended:
        return None
    code, reason, message = ended.get("exitCode"), ended.get("reason") or "", ended.get("message") or ""
    if isinstance(code, int) and code > SIGNALLED and reason == "Error":
        # Whoever is killed leaves no reason; the kubelet puts the end of its log in that place.
        head = f"killed by signal {code - SIGNALLED}"
        message = f"{head}; its log ends: {_end(message, head)}" if message else head
    return ContainerFailure(
        exit_code=code,
        reason=reason,
        message=message,
        at=_time(ended.get("finishedAt")),
    )


def _end(log: str, head: str) -> str:
    """As much of the log as leaves room for what stands before it."""
    return shortened(log, MESSAGE_LIMIT_BYTES - len(f"{head}; its log ends: "))


def _waiting(scheduled: Object, waiting: Object) -> str:
    if scheduled.get("status") == "False":
        return _cut(f"{scheduled.get('reason') or 'Unscheduled'}: {scheduled.get('message') or ''}")
    reason = waiting.get("reason") or ""
    if reason in NOT_WORTH_TELLING:
        return ""
    # Only the word: the message counts tries and seconds, and would change the status each time.
    return str(reason)


def _cut(text: str) -> str:
    text = " ".join(text.split()).rstrip(": ")
    return text if len(text) <= WAITING_LIMIT else f"{text[: WAITING_LIMIT - 1]}…"
