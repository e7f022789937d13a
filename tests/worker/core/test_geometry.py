"""Rows to bytes, and whether receivers and item fit together."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encodepool_worker.core.geometry import (
    balanced_shard,
    byte_slices,
    contract_problem,
    coverage_problem,
    shard_slices,
)
from encodepool_worker.testing import make_layout, make_receiver, make_shards
from encodepool_worker.types import ByteRange, Slice

LAYOUT = make_layout(n_tokens=10, hidden=4, levels=2)  # 16 and 32 bytes a row
PLAIN = make_layout(n_tokens=10, hidden=4)


@pytest.mark.parametrize(
    ("n_rows", "n_ranks", "expected"),
    [
        (10, 1, [(0, 10)]),
        (10, 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
    ],
)
def test_rows_are_shared_as_prefill_ranks_share_them(n_rows, n_ranks, expected):
    assert [balanced_shard(n_rows, n_ranks, rank) for rank in range(n_ranks)] == expected


def test_bytes_are_taken_across_extents_in_order():
    extents = [ByteRange(100, 110), ByteRange(0, 5), ByteRange(50, 80)]
    assert byte_slices(extents, 8, 20, 1000) == [
        Slice(108, 1000, 2),
        Slice(0, 1002, 5),
        Slice(50, 1007, 5),
    ]
    assert byte_slices(extents, 10, 12, 1000) == [Slice(0, 1000, 2)]
    assert byte_slices(extents, 3, 3, 1000) == []


def test_main_rows_and_deepstack_rows_go_to_their_own_addresses():
    receiver = make_receiver(layout=LAYOUT, rows=(2, 5), main_ptr=0x1000)
    extent = ByteRange(4096, 4096 + LAYOUT.nbytes)
    assert shard_slices(LAYOUT, [extent], receiver) == (
        Slice(4096 + 2 * 16, 0x1000, 3 * 16),
        Slice(4096 + 10 * 16 + 2 * 32, receiver.deepstack_ptr, 3 * 32),
    )


def test_without_deepstack_only_main_rows_are_written():
    receiver = make_receiver(layout=PLAIN, main_ptr=0x1000)
    assert shard_slices(PLAIN, [ByteRange(0, 160)], receiver) == (Slice(0, 0x1000, 160),)


def test_a_shard_without_rows_has_nothing_to_write():
    receiver = make_receiver(layout=LAYOUT, rows=(10, 10))
    assert shard_slices(LAYOUT, [ByteRange(0, LAYOUT.nbytes)], receiver) == ()


@given(
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    n_ranks=st.integers(1, 5),
    levels=st.integers(0, 2),
    n_tokens=st.integers(1, 12),
)
def test_shards_put_together_are_the_item_whatever_the_extents(cuts, n_ranks, levels, n_tokens):
    layout = make_layout(n_tokens=n_tokens, levels=levels)
    extents, at, left = [], 0, layout.nbytes
    for cut in [*cuts, layout.nbytes]:
        size = min(cut, left)
        if size:
            extents.insert(0, ByteRange(at, at + size))  # later parts lie lower
        at, left = at + size + 3, left - size
    region = bytearray(at + layout.nbytes)
    content = bytes(i % 251 for i in range(layout.nbytes))
    for piece in byte_slices(extents, 0, layout.nbytes, 0):
        region[piece.source : piece.source + piece.nbytes] = content[
            piece.target : piece.target + piece.nbytes
        ]

    main, deepstack = bytearray(), bytearray()
    for rank in range(n_ranks):
        rows = balanced_shard(n_tokens, n_ranks, rank)
        receiver = make_receiver(layout=layout, rows=rows, fanout=n_ranks, main_ptr=0)
        receiver = replace(receiver, deepstack_ptr=1 << 40)
        for piece in shard_slices(layout, extents, receiver):
            half = deepstack if piece.target >= 1 << 40 else main
            half += region[piece.source : piece.source + piece.nbytes]
    assert main + deepstack == content


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"n_rows": 0, "row_start": 10}, None),
        ({"hidden": 8}, "hidden 8, rows have 4"),
        ({"dtype": "torch.bfloat16"}, "torch.bfloat16, rows are torch.float32"),
        ({"dtype": "float32"}, "wants float32"),
        ({"span": 0}, "expects 0 rows in all, the item has 10"),
        ({"span": 11}, "expects 11 rows"),
        ({"row_start": 1}, r"rows \[1, 11\) of 10"),
        ({"has_deepstack": False}, "wants no deepstack, rows have 2"),
        ({"main_ptr": 2**64 - 159}, "main_ptr .* too close"),
        ({"deepstack_ptr": 2**64 - 319}, "deepstack_ptr .* too close"),
        ({"deepstack_ptr": 2**64 - 320}, None),
    ],
)
def test_a_receivers_contract_is_checked(changes, says):
    problem = contract_problem(replace(make_receiver(layout=LAYOUT), **changes), LAYOUT)
    assert re.search(says, problem) if says else problem is None


def test_deepstack_that_rows_do_not_have_is_refused():
    receiver = replace(make_receiver(layout=PLAIN), has_deepstack=True)
    assert contract_problem(receiver, PLAIN) == "receiver wants deepstack, rows have 0 deepstack levels"


def shards(*rows):
    return [make_receiver(f"s{i}", layout=PLAIN, rows=r, fanout=len(rows)) for i, r in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(0, 10)], None),
        ([(0, 10), (0, 10)], None),  # unsharded prefill: everyone wants everything
        ([(5, 10), (0, 5)], None),
        ([(0, 10), (10, 10), (3, 3)], None),
        ([(0, 4), (5, 10)], "no shard has rows [4, 5)"),
        ([(1, 10)], "no shard has rows [0, 1)"),
        ([(0, 6), (5, 10)], "row 5 is in two shards"),
        ([(0, 10), (0, 5)], "row 0 is in two shards"),
        ([(0, 5), (5, 9)], "shards end at row 9, not at 10"),
        ([(0, 0), (10, 10)], "shards end at row 0, not at 10"),
    ],
)
def test_shards_must_tile_the_item_exactly(rows, problem):
    """TokenSpeed accepts contiguous shards that stop short of the item."""
    assert coverage_problem(shards(*rows), 10) == problem


def test_every_balanced_set_tiles_the_item():
    for n in range(1, 13):
        assert coverage_problem(make_shards([f"s{i}" for i in range(n)], layout=PLAIN), 10) is None


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(4, 6), (6, 8)], None),
        ([(0, 10), (0, 10)], None),
        ([(4, 6)], "shards end at row 6, not at 8"),
        ([(4, 9)], "shards end at row 9, not at 8"),
        ([(2, 8)], "row 2 is served elsewhere"),
        ([(5, 8)], "no shard has rows [4, 5)"),
    ],
)
def test_a_rank_that_serves_a_block_checks_its_block(rows, problem):
    assert coverage_problem(shards(*rows), 10, block=(4, 8)) == problem


def test_a_block_without_rows_wants_none():
    assert coverage_problem(shards((10, 10), (10, 10)), 10, block=(10, 10)) is None
