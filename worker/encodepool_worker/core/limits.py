"""What bounds the pipeline, and what it tells about itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Every bound of the pipeline. Raises ConfigError with all problems at once.

    ``store_bytes`` is the length of the store's first tier, where the tower's rows are put;
    ``second_tier_bytes`` that of the second, which takes what the first has no space for (0: there
    is none); each of the ``n_ranks`` has both. Entries start at multiples of ``store_alignment`` in
    their tier. Bytes that late writes pin are capped at ``max_quarantined_bytes`` (None: a quarter of
    the first tier); above it engines are retired.
    """

    store_bytes: int
    second_tier_bytes: int = 0
    n_ranks: int = 1
    store_alignment: int = 256
    max_quarantined_bytes: int | None = None

    max_tokens_per_batch: int = 8192
    max_items_per_batch: int = 160
    max_queue_cost: int = 65_536  # tokens that may wait for the tower; more only where nothing waits
    max_wait_s: float = 60.0  # until the tower begins, as predicted when an item comes

    announce_s: float = 60.0  # receivers without a request
    queue_s: float = 120.0  # an item without an entry; equal to park_s, after which space must have come
    park_s: float = 120.0  # a filled entry without all receivers; as the reference
    quarantine_s: float = 10.0  # twice the transfer timeout
    tombstone_s: float = 330.0  # prefill waits 300
    max_tombstones: int = 65_536
    max_rooms: int = 65_536  # rooms that are not tombstones; a flood of frames costs no more
    max_ends_per_turn: int = 512  # rooms that time or a drain ends in one turn; the next goes on
    max_demotions: int = 256  # copies into the second tier under way
    story_records: int = 4_096

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be > 0, is {getattr(self, name)}"
            for name in self.__dataclass_fields__
            if name != "second_tier_bytes" and getattr(self, name) is not None and not getattr(self, name) > 0
        ]
        if self.second_tier_bytes < 0:
            problems.append(f"second_tier_bytes must be >= 0, is {self.second_tier_bytes}")
        if not problems and self.store_bytes < self.store_alignment:
            problems.append(
                f"store_bytes ({self.store_bytes}) must be >= store_alignment ({self.store_alignment})"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def quarantine_bytes(self) -> int:
        if self.max_quarantined_bytes is not None:
            return self.max_quarantined_bytes
        return self.store_bytes // 4

    @property
    def free_ahead_bytes(self) -> int:
        """Of the first tier, what is kept free or on its way out, so that a batch need not wait.

        An eighth: at the defaults 512 MiB, the rows of two full batches of a large tower.
        """
        return self.store_bytes // 8 if self.second_tier_bytes else 0


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """Bytes of one tier. The states and ``free_bytes`` add up to ``capacity_bytes``.

    Reserved bytes of the second tier are targets of copies under way. ``evictions`` are entries
    that left the tier for want of space.
    """

    capacity_bytes: int
    free_bytes: int
    bytes_by_state: Mapping[str, int]  # reserved, filling, held, cached
    evictions: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """The store: its one or two tiers in order, and sums over them.

    ``pinned_bytes`` are entries that a late write may still read, whatever their state and tier.
    ``unclaimed_bytes`` are entries of the first tier wanted by rooms whose receivers have not all
    spoken. ``moving`` entries are being copied into the second tier.
    """

    tiers: tuple[TierSnapshot, ...]
    entries: int
    moving: int
    pinned_bytes: int
    unclaimed_bytes: int

    @property
    def capacity_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self.tiers)

    @property
    def free_bytes(self) -> int:
        return sum(tier.free_bytes for tier in self.tiers)

    @property
    def bytes_by_state(self) -> dict[str, int]:
        states = self.tiers[0].bytes_by_state
        return {state: sum(tier.bytes_by_state[state] for tier in self.tiers) for state in states}


COUNTERS = {
    "admitted": "submissions taken",
    "refused": "submissions refused",
    "refused_requests": "requests that the frontend refused",
    "repeated_requests": "submissions that repeat their room's item",
    "identity_clashes": "submissions for a room of another item",
    "hits": "rooms whose rows were in the store",
    "hits_second_tier": "those of them whose rows lay in the second tier",
    "demotions": "entries that moved into the second tier",
    "demotions_in_vain": "copies of entries that were wanted again before the copy was done",
    "demotions_failed": "entries lost because they could not be copied",
    "joined": "rooms that share the rows of another room's job",
    "misses": "items handed to the tower",
    "batches": "batches handed to the tower",
    "batches_failed": "batches that failed as a whole",
    "retried_items": "items of failed batches that got a turn of their own",
    "given_up_items": "items that were denied a turn of the tower, since they would have been late",
    "items_failed": "items for which the tower has no rows",
    "expired": "rooms whose deadline passed",
    "expired_before_encode": "rooms whose deadline passed before they had rows",
    "writes": "writes handed out",
    "written_bytes": "bytes of writes that landed",
    "writes_failed": "writes that failed, late ones included",
    "writes_late": "writes that timed out and may still land",
    "engines_retired": "engines given up: late writes pinned too much, or a drain's time was up",
    "reshipments": "writes to receivers that asked again",
    "bad_reshipments": "receivers that asked again and cannot be served",
    "surplus_receivers": "receivers beyond a room's fan-out",
    "repeated_frames": "frames that repeat what is known",
    "replaced_frames": "frames that gave a waiting receiver another address",
    "told_success": "verdicts sent",
    "told_failed": "verdicts sent",
    "ignored": "events that their room does not mind",
    "tombstones_evicted": "tombstones that left before their time",
}
"""Counters of a pipeline: they only grow."""


@dataclass(frozen=True, slots=True)
class PipelineSnapshot:
    """Numbers of one moment: gauges, and counters that only grow.

    ``queue_since_s`` is when the oldest queued item was admitted, ``batch_since_s`` when the
    running batch was handed out (None: nothing queued, nothing running), ``batch_expected_s`` how long it
    should take in all. ``predicted_wait_s`` is until the tower would begin with an item that came now,
    ``tokens_per_s`` what it does in full batches; None before its first batch.
    ``counters`` has every name of COUNTERS.
    """

    rooms_by_state: Mapping[str, int]
    queue_items: int
    queue_cost: int
    queue_since_s: float | None
    batch_items: int
    batch_since_s: float | None
    batch_expected_s: float | None
    predicted_wait_s: float | None
    tokens_per_s: float | None
    writes_in_flight: int
    writes_quarantined: int
    draining: bool
    drained: bool
    store: StoreSnapshot
    counters: Mapping[str, int] = field(default_factory=dict)
