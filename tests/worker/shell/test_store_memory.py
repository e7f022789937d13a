"""The store's memory: rows copied once, over any cut of the extents, and nothing beside them."""

import mmap

import pytest
import torch

from encodepool_worker.errors import ConfigError, WorkerError
from encodepool_worker.shell.pixels import Pixels, PixelTable
from encodepool_worker.shell.store_memory import StoreMemory
from encodepool_worker.types import ByteRange, Grid

MIB = 1024 * 1024


def halves(n_tokens, hidden, levels, dtype=torch.float32):
    """A batch's matrix with neighbours around ours, and our two halves of it."""
    width = (1 + levels) * hidden
    rows = torch.arange((n_tokens + 2) * width).reshape(n_tokens + 2, width).to(dtype)
    part = rows[1 : 1 + n_tokens]
    return part[:, :hidden], part[:, hidden:]


def expected_bytes(parts):
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cut", [[640], [8, 632], [128, 512], [4, 4, 8, 624], [384, 256], [400, 240], [636, 4]]
)
def test_rows_fill_the_extents_in_order_wherever_these_are_cut(dtype, cut):
    hidden, levels, n_tokens = (8, 3, 5) if dtype is torch.float32 else (16, 3, 5)
    memory = StoreMemory(64 * 1024, pinned=False)
    parts = halves(n_tokens, hidden, levels, dtype)
    assert sum(cut) == 640
    extents, start = [], 4096
    for nbytes in reversed(cut):
        extents.append(ByteRange(start, start + nbytes))
        start += nbytes + 256
    extents = extents[::-1]
    # In order of the list, not of the addresses.
    assert [extent.nbytes for extent in extents] == cut

    before = memory.read(ByteRange(0, memory.nbytes))
    memory.put(extents, parts)
    after = bytearray(memory.read(ByteRange(0, memory.nbytes)))
    assert b"".join(memory.read(extent) for extent in extents) == expected_bytes(parts)
    for extent in extents:
        after[extent.start : extent.stop] = before[extent.start : extent.stop]
    assert bytes(after) == before


def test_rows_without_deepstack_are_one_part():
    memory = StoreMemory(4096, pinned=False)
    main, deepstack = halves(3, 8, 0)
    assert deepstack.numel() == 0
    memory.put([ByteRange(0, 96)], [main])
    assert memory.read(ByteRange(0, 96)) == expected_bytes([main])


def test_rows_that_do_not_fit_are_refused_before_anything_is_written():
    memory = StoreMemory(4096, pinned=False)
    before = memory.read(ByteRange(0, 4096))
    with pytest.raises(WorkerError, match="do not fit"):
        memory.put([ByteRange(0, 95)], [halves(3, 8, 0)[0]])
    assert memory.read(ByteRange(0, 4096)) == before


def test_the_region_is_page_aligned_and_whole_pages_long():
    memory = StoreMemory(10_000, pinned=False)
    assert memory.ptr % mmap.PAGESIZE == 0
    assert memory.nbytes == 3 * mmap.PAGESIZE


def test_both_sizes_make_one_tier():
    assert StoreMemory.of(2 * MIB, 3 * MIB, pinned=False).nbytes == 5 * MIB


def test_memory_that_is_not_there_is_a_problem_of_the_configuration():
    with pytest.raises(ConfigError, match="lower store_device_mib"):
        StoreMemory(2**60, pinned=False)


def test_pixels_are_read_where_they_lie():
    payload = bytearray(torch.arange(24, dtype=torch.float32).numpy().tobytes())
    pixels = Pixels(memoryview(payload), "float32", (4, 6), (Grid(1, 2, 2),))
    tensor = pixels.tensor()
    assert torch.equal(tensor, torch.arange(24, dtype=torch.float32).view(4, 6))
    payload[0:4] = torch.tensor([7.0]).numpy().tobytes()
    assert tensor[0, 0] == 7.0


def test_pixels_at_an_odd_address_are_copied_and_right():
    values = torch.arange(24, dtype=torch.float32)
    payload = bytearray(b"\0\0\0" + values.numpy().tobytes())
    pixels = Pixels(memoryview(payload)[3:], "float32", (4, 6), (Grid(1, 2, 2),))
    assert torch.equal(pixels.tensor(), values.view(4, 6))


def test_bfloat16_pixels_and_empty_ones_are_understood():
    values = torch.arange(8, dtype=torch.bfloat16)
    payload = bytearray(values.view(torch.uint8).numpy().tobytes())
    assert torch.equal(Pixels(memoryview(payload), "bfloat16", (2, 4), ()).tensor(), values.view(2, 4))
    assert Pixels(memoryview(bytearray()), "float32", (0, 6), ()).tensor().shape == (0, 6)


def test_a_handle_is_dropped_once():
    table = PixelTable()
    handle = table.add(Pixels(memoryview(bytearray(4)), "float32", (1, 1), ()))
    assert len(table) == 1
    table.drop(handle)
    assert len(table) == 0
    with pytest.raises(KeyError):
        table.drop(handle)
    with pytest.raises(KeyError):
        table.get(handle)
