"""Items, receivers and limits with defaults; a test names only what matters to it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.geometry import balanced_shard
from ..core.limits import PipelineLimits
from ..types import Item, Modality, Receiver, RowLayout, wire_dtype


def make_layout(n_tokens: int = 4, hidden: int = 4, levels: int = 0, dtype: str = "float32") -> RowLayout:
    return RowLayout(n_tokens, hidden, levels, dtype)


def make_key(content: str) -> bytes:
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def make_item(
    room: int = 7,
    content: str | None = None,
    *,
    layout: RowLayout | None = None,
    request_id: str | None = None,
    index: int = 0,
    cost: int | None = None,
    deadline_s: float | None = None,
) -> Item:
    """An item of content of its own, unless ``content`` says otherwise."""
    layout = layout or make_layout()
    return Item(
        request_id=f"request-{room}" if request_id is None else request_id,
        index=index,
        room=room,
        key=make_key(f"room {room}" if content is None else content),
        modality=Modality.IMAGE,
        layout=layout,
        cost=layout.n_tokens if cost is None else cost,
        deadline_s=deadline_s,
    )


def make_receiver(
    session: str = "p",
    *,
    layout: RowLayout | None = None,
    rows: tuple[int, int] | None = None,
    fanout: int = 1,
    main_ptr: int = 0x10_0000,
    span: int | None = None,
    status_port: int = 5000,
    rank: int = 0,
) -> Receiver:
    """A receiver whose contract fits ``layout``; it wants ``rows`` [start, stop), or all."""
    layout = layout or make_layout()
    start, stop = rows or (0, layout.n_tokens)
    return Receiver(
        session=session,
        host="127.0.0.1",
        status_port=status_port,
        main_ptr=main_ptr,
        deepstack_ptr=main_ptr + 0x100_0000 if layout.levels else 0,
        n_rows=stop - start,
        hidden=layout.hidden,
        dtype=wire_dtype(layout.dtype),
        has_deepstack=layout.levels > 0,
        fanout=fanout,
        row_start=start,
        span=layout.n_tokens if span is None else span,
        rank=rank,
    )


def make_shards(
    sessions: Sequence[str], *, layout: RowLayout | None = None, n_ranks: int = 1
) -> list[Receiver]:
    """Receivers that share the rows as prefill ranks do, as many at each encode rank."""
    layout = layout or make_layout()
    n = len(sessions)
    fanout = n // n_ranks
    return [
        make_receiver(
            session,
            layout=layout,
            fanout=fanout,
            rows=balanced_shard(layout.n_tokens, n, place),
            rank=place // fanout,
        )
        for place, session in enumerate(sessions)
    ]


def make_limits(store_bytes: int = 64 * 1024, **changes: float) -> PipelineLimits:
    return PipelineLimits(**{"store_bytes": store_bytes, "store_alignment": 16, **changes})  # type: ignore[arg-type]


def rows_of(key: bytes, layout: RowLayout) -> bytes:
    """The bytes that the tower of the tests makes of a content key."""
    return hashlib.shake_128(key).digest(layout.nbytes)


@dataclass
class FakeClock:
    """Monotonic seconds that pass when told to."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s
