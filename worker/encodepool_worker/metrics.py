"""Every metric of the worker: one table, from which /metrics and docs/metrics.md are made.

The frontend serves them on the metrics port. What only the loop knows it reports in its State, as
``counters`` by the names that ``sample_name`` makes. ``python -m encodepool_worker.metrics`` prints
docs/metrics.md.
"""

import re
from dataclasses import dataclass
from types import MappingProxyType

COUNTER = "counter"
GAUGE = "gauge"

FRONTEND = "frontend"
LOOP = "loop"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. Counters end in ``_total`` and only grow within one process."""

    name: str
    kind: str
    source: str
    help: str
    labels: tuple[str, ...] = ()


TABLE: tuple[Metric, ...] = (
    Metric(
        "encodepool_requests_total",
        COUNTER,
        FRONTEND,
        "Encode calls by outcome: accepted, invalid, exhausted, unavailable, late, cancelled, broken.",
        ("outcome",),
    ),
    Metric(
        "encodepool_requests_refused_total",
        COUNTER,
        FRONTEND,
        "Encode calls answered INVALID_ARGUMENT, by the field at fault.",
        ("field",),
    ),
    Metric(
        "encodepool_request_bytes_total", COUNTER, FRONTEND, "Bytes of Encode messages and their segments."
    ),
    Metric("encodepool_hash_seconds_total", COUNTER, FRONTEND, "Time spent naming contents."),
    Metric(
        "encodepool_refusals_dropped_total",
        COUNTER,
        FRONTEND,
        "Refusals that could not be passed to the loop, so that receivers were not told.",
    ),
    Metric(
        "encodepool_requests_waiting", GAUGE, FRONTEND, "Encode calls that wait unread for the pixel budget."
    ),
    Metric(
        "encodepool_pixel_bytes",
        GAUGE,
        FRONTEND,
        "Bytes charged to the pixel budget: reading (a reader counts as one longest message) and queued.",
        ("part",),
    ),
    Metric("encodepool_pixel_limit_bytes", GAUGE, FRONTEND, "The pixel budget."),
    Metric("encodepool_credit_tokens", GAUGE, FRONTEND, "Tokens handed to the loop and not yet given back."),
    Metric(
        "encodepool_predicted_wait_seconds", GAUGE, FRONTEND, "Until the tower begins with the next item."
    ),
    Metric("encodepool_ready", GAUGE, FRONTEND, "1 while the gateway may send work."),
    Metric("encodepool_turn_age_seconds", GAUGE, FRONTEND, "Since the loop's last turn."),
    Metric(
        "encodepool_batch_age_seconds", GAUGE, FRONTEND, "Since the running batch began; absent without one."
    ),
    Metric("encodepool_queue_items", GAUGE, FRONTEND, "Items that wait for the tower, as the loop reports."),
    Metric("encodepool_queue_tokens", GAUGE, FRONTEND, "Tokens of these items."),
    Metric(
        "encodepool_tower_tokens_per_second",
        GAUGE,
        FRONTEND,
        "Rate of the tower in full batches, as far as seen.",
    ),
    Metric("encodepool_rooms_total", COUNTER, LOOP, "Rooms by outcome: success, failed.", ("outcome",)),
    Metric("encodepool_queue_age_seconds", GAUGE, LOOP, "Since the oldest waiting item came."),
    Metric("encodepool_batches_total", COUNTER, LOOP, "Batches the tower ran."),
    Metric("encodepool_batch_items_total", COUNTER, LOOP, "Items of these batches."),
    Metric("encodepool_batch_tokens_total", COUNTER, LOOP, "Tokens of these batches."),
    Metric("encodepool_tower_seconds_total", COUNTER, LOOP, "Time the tower ran."),
    Metric("encodepool_tower_failures_total", COUNTER, LOOP, "Items the tower could not encode."),
    Metric(
        "encodepool_expired_total", COUNTER, LOOP, "Items whose deadline passed before the tower took them."
    ),
    Metric("encodepool_deduplicated_total", COUNTER, LOOP, "Items that joined an encode under way."),
    Metric(
        "encodepool_hits_total",
        COUNTER,
        LOOP,
        "Items whose rows were in the store, by the tier they were sent from: device, host.",
        ("tier",),
    ),
    Metric("encodepool_hit_bytes_total", COUNTER, LOOP, "Bytes of these rows.", ("tier",)),
    Metric(
        "encodepool_evictions_total",
        COUNTER,
        LOOP,
        "Entries that left a tier to make room; from the device also those that moved to the host.",
        ("tier",),
    ),
    Metric(
        "encodepool_demotions_total",
        COUNTER,
        LOOP,
        "Copies from device to host by outcome: moved, kept (wanted again meanwhile), failed.",
        ("outcome",),
    ),
    Metric(
        "encodepool_store_bytes",
        GAUGE,
        LOOP,
        "Bytes of a tier: free, or by the state of their entry (reserved, filling, held, cached).",
        ("state", "tier"),
    ),
    Metric("encodepool_store_pinned_bytes", GAUGE, LOOP, "Bytes in quarantine after a write that timed out."),
    Metric("encodepool_transfer_bytes_total", COUNTER, LOOP, "Bytes written to receivers."),
    Metric("encodepool_transfer_seconds_total", COUNTER, LOOP, "Time of the writes that succeeded."),
    Metric(
        "encodepool_transfer_failures_total", COUNTER, LOOP, "Writes that failed, by reason.", ("reason",)
    ),
    Metric("encodepool_quarantines_total", COUNTER, LOOP, "Writes that timed out and may land late."),
    Metric("encodepool_breakers_open", GAUGE, LOOP, "Peers that are not written to for now."),
    Metric("encodepool_status_dropped_total", COUNTER, LOOP, "Status frames that a receiver did not take."),
    Metric("encodepool_frames_malformed_total", COUNTER, LOOP, "Control frames that could not be read."),
    Metric(
        "encodepool_ranks_refused_total",
        COUNTER,
        LOOP,
        "Strangers and stale ranks that wanted to join the group.",
    ),
)

BY_NAME = MappingProxyType({metric.name: metric for metric in TABLE})

_SAMPLE = re.compile(r'(\w+)(?:\{(\w+="[^"{}\\\n]*"(?:,\w+="[^"{}\\\n]*")*)\})?')
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def sample_name(name: str, **labels: str) -> str:
    """``name`` or ``name{label="value"}``, as the loop's counters are keyed. Raises KeyError, ValueError.

    The value of a label loses what the text format would have to escape.
    """
    if tuple(labels) != BY_NAME[name].labels:
        raise ValueError(f"{name} has the labels {BY_NAME[name].labels}, not {tuple(labels)}")
    if not labels:
        return name
    inner = ",".join(f'{label}="{_plain(value)}"' for label, value in labels.items())
    return f"{name}{{{inner}}}"


def parse_sample(sample: str) -> tuple[str, tuple[str, ...]] | None:
    """Name and label values of a sample of the table; None for anything else."""
    match = _SAMPLE.fullmatch(sample)
    if match is None or match[1] not in BY_NAME:
        return None
    labels = _LABEL.findall(match[2] or "")
    if tuple(label for label, _ in labels) != BY_NAME[match[1]].labels:
        return None
    return match[1], tuple(value for _, value in labels)


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics of the worker",
        "",
        "Made from the table in `worker/encodepool_worker/metrics.py` by",
        "`python -m encodepool_worker.metrics`; a test compares the two.",
        "",
        "`GET /metrics` on the metrics port, in the Prometheus text format. *Loop* metrics are as old as the",
        "loop's last report (at most a second while it works); `encodepool_turn_age_seconds` tells how old.",
        "",
        "| metric | kind | labels | from | meaning |",
        "|---|---|---|---|---|",
    ]
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.source} | {metric.help} |")
    return "\n".join(lines) + "\n"


def _plain(value: str) -> str:
    return re.sub(r'["{}\\\n]', "_", value)


if __name__ == "__main__":
    print(metrics_page(), end="")
