"""The table of the resource's status: what ``core.status`` writes. Only for the CRD's schema.

Whatever is missing here is dropped by the API server without a word, and the operator would write it
again and again: a test compares the table with statuses that the planner makes.
"""

from typing import Any

from .field import INT32_MAX, Field, Kind, Shape, Unset

INT64_MAX = 2**63 - 1
TIME = 40
"""Characters of a time, RFC 3339 in UTC."""


def _number(key: str, doc: str, maximum: int = INT32_MAX, **more: Any) -> Field:
    return Field(key, Kind.INTEGER, doc, maximum=maximum, **more)


def _text(key: str, doc: str, max_length: int = 253, **more: Any) -> Field:
    return Field(key, Kind.STRING, doc, max_length=max_length, **more)


def _required(field: Field) -> Field:
    return Field(
        field.key,
        field.kind,
        field.doc,
        Unset.REQUIRED,
        maximum=field.maximum,
        max_length=field.max_length,
        choices=field.choices,
    )


def _object(key: str, doc: str, *fields: Field) -> Field:
    return Field(key, Kind.OBJECT, doc, None, shape=Shape(dict, fields))


def _list(key: str, doc: str, max_length: int, by: str, *fields: Field) -> Field:
    item = _object("item", "One entry.", *fields)
    return Field(key, Kind.LIST, doc, (), max_length=max_length, item=item, list_keys=(by,))


_FAILURE = _object(
    "lastFailure",
    "Why the group was recreated last.",
    _text("time", "When it was seen.", TIME),
    _number("incarnation", "The start that failed.", INT64_MAX),
    _text("reason", "One word."),
    _text("pod", "The pod that failed."),
    _text("node", "Its node."),
    _text("container", "The container that failed."),
    _number("exitCode", "128 + n for signal n; left out when unknown.", minimum=-(2**31)),
    _text("message", "The end of its termination message.", 1024),
    Field("counted", Kind.BOOLEAN, "Whether it counts for backoff and maxRestarts."),
)

STATUS = _object(
    "status",
    "What the pool is; written by the operator, and read by it only for numbers that must not be lost.",
    _number("observedGeneration", "Generation of the spec that this status is about.", INT64_MAX),
    _text("model", "The served model name.", 4096),
    _number("replicas", "Groups that exist."),
    _number("readyReplicas", "Groups whose pods are all ready."),
    _number("updatedReplicas", "Groups on the wanted revision."),
    _number("availableReplicas", "Groups in the published list."),
    _number("unavailableReplicas", "Groups that are wanted and not in the list."),
    _number("ranks", "Ranks of the groups that exist."),
    _number("readyRanks", "Ranks of ready groups."),
    _text("selector", "Label selector of the leaders, for autoscalers.", 512),
    _text("currentRevision", "Revision of the last complete rollout.", 63),
    _text("updateRevision", "The wanted revision.", 63),
    _number("lastIncarnation", "Highest incarnation that was ever given out.", INT64_MAX),
    _object(
        "rollout",
        "Progress towards the wanted revision.",
        _number("updatedAvailable", "Groups of the wanted revision in the list."),
        _text("progressedAt", "When it last grew.", TIME),
    ),
    _list(
        "conditions",
        "Ready, Available, Progressing, Degraded, EndpointsPublished; Reconciling and Stalled while true.",
        16,
        "type",
        _required(_text("type", "Its name.", 316)),
        _required(_text("status", "Whether it holds.", choices=("True", "False", "Unknown"))),
        _required(_text("reason", "One word.", 1024)),
        _required(_text("message", "A sentence.", 32768)),
        _required(_text("lastTransitionTime", "When status last changed.", TIME)),
        _number("observedGeneration", "Generation it is about.", INT64_MAX),
    ),
    _list(
        "groups",
        "Groups that are not in the list, those that need a human first; at most 20.",
        20,
        "index",
        _required(_number("index", "The group.")),
        _text("phase", "Stopped, Starting, Ready, Draining, Failing, Backoff or Lost.", 32),
        _text("reason", "Why.", 4096),
        _text("revision", "The revision of its pods.", 63),
        _number("incarnation", "Number of its start.", INT64_MAX),
        _text("host", "Address of its leader.", 64),
        _number("bootstrapPort", "Port of its bootstrap server.", 65535),
        _number("restarts", "Failures in a row."),
        _text("nextRestartTime", "When it is started again.", TIME),
        _FAILURE,
    ),
    _number("groupsTruncated", "Further groups that are not in the list."),
    _object(
        "consumer",
        "Flags that make the SMG gateway follow the pool.",
        _text("smg", "By Kubernetes discovery; --prefill-selector and --decode-selector are yours.", 1024),
        _text("smgFile", "By the file that `encodepool endpoints follow` keeps.", 1024),
        _text("smgStatic", "With the addresses of now: the tokens of `smg-args` belong behind it.", 1024),
    ),
)
"""The whole of ``status``."""
