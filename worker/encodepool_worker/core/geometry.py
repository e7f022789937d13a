"""Rows to bytes: which bytes a receiver gets, and whether receivers and item fit together.

An entry holds the main rows ``[n_tokens, hidden]`` and behind them the deepstack rows
``[n_tokens, levels * hidden]``, both row-major without padding, scattered over extents.
Checks return a sentence that says what is wrong, or None.
"""

from collections.abc import Iterable, Sequence

from ..types import ByteRange, Receiver, RowLayout, Slice, wire_dtype


def balanced_shard(n_rows: int, n_ranks: int, rank: int) -> tuple[int, int]:
    """Rows [start, stop) of one of ``n_ranks`` prefill ranks, as TokenSpeed shards them.

    The first ``n_rows % n_ranks`` ranks get one row more; ranks without rows start at ``n_rows``.
    """
    base, more = divmod(n_rows, n_ranks)
    start = rank * base + min(rank, more)
    return start, start + base + (1 if rank < more else 0)


def byte_slices(extents: Sequence[ByteRange], start: int, stop: int, target: int) -> list[Slice]:
    """Bytes [start, stop) of what the extents hold, in order, to ``target`` and on."""
    slices = []
    base = 0  # offset of the extent within what the extents hold
    for extent in extents:
        if base >= stop:
            break
        low, high = max(start, base), min(stop, base + extent.nbytes)
        if low < high:
            slices.append(Slice(extent.start + low - base, target + low - start, high - low))
        base += extent.nbytes
    return slices


def shard_slices(layout: RowLayout, extents: Sequence[ByteRange], receiver: Receiver) -> tuple[Slice, ...]:
    """What to write to a receiver whose contract holds: its main rows, then its deepstack rows."""
    start, stop = receiver.row_start, receiver.row_start + receiver.n_rows
    main, deepstack = layout.main_row_bytes, layout.deepstack_row_bytes
    slices = byte_slices(extents, start * main, stop * main, receiver.main_ptr)
    if deepstack:
        behind = layout.main_bytes
        slices += byte_slices(
            extents, behind + start * deepstack, behind + stop * deepstack, receiver.deepstack_ptr
        )
    return tuple(slices)


def contract_problem(receiver: Receiver, layout: RowLayout) -> str | None:
    """Why these rows must not be written to this receiver. A write itself checks nothing."""
    if receiver.hidden != layout.hidden:
        return f"receiver wants hidden {receiver.hidden}, rows have {layout.hidden}"
    if receiver.dtype != wire_dtype(layout.dtype):
        return f"receiver wants {receiver.dtype}, rows are {wire_dtype(layout.dtype)}"
    if receiver.span != layout.n_tokens:
        return f"receiver expects {receiver.span} rows in all, the item has {layout.n_tokens}"
    if receiver.row_start + receiver.n_rows > layout.n_tokens:
        stop = receiver.row_start + receiver.n_rows
        return f"receiver wants rows [{receiver.row_start}, {stop}) of {layout.n_tokens}"
    if receiver.has_deepstack != (layout.levels > 0):
        wants = "deepstack" if receiver.has_deepstack else "no deepstack"
        return f"receiver wants {wants}, rows have {layout.levels} deepstack levels"
    for name, pointer, row_bytes in (
        ("main_ptr", receiver.main_ptr, layout.main_row_bytes),
        ("deepstack_ptr", receiver.deepstack_ptr, layout.deepstack_row_bytes),
    ):
        if pointer + receiver.n_rows * row_bytes > 2**64:
            return f"receiver's {name} {pointer:#x} is too close to the end of its address space"
    return None


def block_of(n_tokens: int, n_ranks: int, fanout: int, rank: int) -> tuple[int, int]:
    """Rows [start, stop) that encode rank ``rank`` serves: the shards of its ``fanout`` prefill ranks.

    Prefill rank ``p`` speaks to encode rank ``p // fanout``, so they are adjacent.
    """
    shards = n_ranks * fanout
    start, _ = balanced_shard(n_tokens, shards, rank * fanout)
    _, stop = balanced_shard(n_tokens, shards, (rank + 1) * fanout - 1)
    return start, stop


def coverage_problem(
    receivers: Iterable[Receiver], n_tokens: int, block: tuple[int, int] | None = None
) -> str | None:
    """Why these receivers together do not cover what their rank serves.

    Right are: all of them want all rows, or their shards tile ``block`` [start, stop) exactly,
    without gap, overlap or missing end. A rank that serves some of the prefill ranks has
    their rows as its block; None means all rows [0, n_tokens). Shards without rows are right
    anywhere.
    """
    shards = sorted([(r.row_start, r.row_start + r.n_rows) for r in receivers if r.n_rows])
    if shards and shards[0] == shards[-1] == (0, n_tokens):
        return None
    start, stop = block or (0, n_tokens)
    reached = start
    for low, high in shards:
        if low > reached:
            return f"no shard has rows [{reached}, {low})"
        if low < reached:
            return f"row {low} is in two shards" if low >= start else f"row {low} is served elsewhere"
        reached = high
    if reached != stop:
        return f"shards end at row {reached}, not at {stop}"
    return None
