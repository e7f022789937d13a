"""The store's memory: rows copied over any cut of the extents, and nothing beside them; its tiers."""

import ctypes
import mmap

import pytest
import torch

from encodepool_worker.errors import ConfigError, WorkerError
from encodepool_worker.settings import Settings
from encodepool_worker.shell.pixels import Pixels, PixelTable
from encodepool_worker.shell.store_memory import StoreMemory
from encodepool_worker.shell.tiers import TierPlan, plan_tiers
from encodepool_worker.transport import mooncake
from encodepool_worker.transport.choose import reads_device_memory
from encodepool_worker.types import ByteRange, Grid

MIB = 1024 * 1024


def host_memory(*sizes):
    return StoreMemory([TierPlan("host", nbytes, torch.device("cpu")) for nbytes in sizes])


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
    memory = host_memory(64 * 1024)
    parts = halves(n_tokens, hidden, levels, dtype)
    assert sum(cut) == 640
    extents, start = [], 4096
    for nbytes in reversed(cut):
        extents.append(ByteRange(start, start + nbytes))
        start += nbytes + 256
    extents = extents[::-1]
    # In order of the list, not of the addresses.
    assert [extent.nbytes for extent in extents] == cut

    before = memory.read(ByteRange(0, 64 * 1024))
    memory.put(extents, parts)
    after = bytearray(memory.read(ByteRange(0, 64 * 1024)))
    assert b"".join(memory.read(extent) for extent in extents) == expected_bytes(parts)
    for extent in extents:
        after[extent.start : extent.stop] = before[extent.start : extent.stop]
    assert bytes(after) == before


def test_rows_without_deepstack_are_one_part():
    memory = host_memory(4096)
    main, deepstack = halves(3, 8, 0)
    assert deepstack.numel() == 0
    memory.put([ByteRange(0, 96)], [main])
    assert memory.read(ByteRange(0, 96)) == expected_bytes([main])


def test_rows_that_do_not_fit_are_refused_before_anything_is_written():
    memory = host_memory(4096)
    before = memory.read(ByteRange(0, 4096))
    with pytest.raises(WorkerError, match="do not fit"):
        memory.put([ByteRange(0, 95)], [halves(3, 8, 0)[0]])
    assert memory.read(ByteRange(0, 4096)) == before


def test_each_tier_is_page_aligned_and_whole_pages_long():
    memory = host_memory(10_000, 5_000)
    assert memory.sizes == (3 * mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    assert [region.nbytes for region in memory.regions] == list(memory.sizes)
    assert all(region.ptr % mmap.PAGESIZE == 0 for region in memory.regions)


def test_the_second_tier_lies_behind_the_first_and_rows_are_copied_there_over_any_cut():
    memory = host_memory(4096, 8192)
    parts = halves(5, 8, 3)
    source = [ByteRange(100, 400), ByteRange(1000, 1340)]
    target = [ByteRange(4096, 4100), ByteRange(12000, 12288), ByteRange(5000, 5348)]
    memory.put(source, parts)
    around = memory.read(ByteRange(4100, 5000)), memory.read(ByteRange(5348, 12000))
    memory.copy(source, target)
    assert b"".join(memory.read(extent) for extent in target) == expected_bytes(parts)
    assert b"".join(memory.read(extent) for extent in source) == expected_bytes(parts)
    assert (memory.read(ByteRange(4100, 5000)), memory.read(ByteRange(5348, 12000))) == around
    second = (ctypes.c_char * 4).from_address(memory.regions[1].ptr)
    assert bytes(second) == expected_bytes(parts)[:4]


def test_a_copy_into_too_little_space_is_refused():
    memory = host_memory(4096, 4096)
    with pytest.raises(WorkerError, match="smaller than its source"):
        memory.copy([ByteRange(0, 100)], [ByteRange(4096, 4195)])
    with pytest.raises(WorkerError, match="beyond its end"):
        memory.read(ByteRange(8192, 8200))


def test_memory_that_is_not_there_is_a_problem_of_the_configuration():
    with pytest.raises(ConfigError, match="lower store_device_mib"):
        host_memory(4096, 2**60)


@pytest.mark.parametrize(
    ("device", "readable", "device_mib", "host_mib", "tiers"),
    [
        ("cpu", False, 2, 3, [("host", 5, "cpu", False)]),
        ("cpu", True, 0, 3, [("host", 3, "cpu", False)]),
        ("cuda", True, 2, 3, [("device", 2, "cuda", False), ("host", 3, "cpu", True)]),
        ("cuda", True, 2, 0, [("device", 2, "cuda", False)]),
        ("cuda", True, 0, 3, [("host", 3, "cpu", True)]),
        ("cuda", False, 2, 3, [("host", 5, "cpu", True)]),
    ],
)
def test_settings_and_device_decide_about_the_tiers(
    monkeypatch, device, readable, device_mib, host_mib, tiers
):
    monkeypatch.setattr("encodepool_worker.shell.tiers.reads_device_memory", lambda backend: readable)
    settings = Settings(model="m", store_device_mib=device_mib, store_host_mib=host_mib)
    plan = plan_tiers(settings, torch.device(device))
    assert [(t.name, t.nbytes // MIB, t.device.type, t.pinned) for t in plan] == tiers


def test_only_a_cuda_build_of_the_engine_sends_from_a_gpu(monkeypatch):
    """The wheel without CUDA would read a GPU's address as one of the host's."""
    monkeypatch.setattr(mooncake, "CUDA_WHEELS", ("no-such-wheel", "pytest"))  # one that is here
    assert reads_device_memory("mooncake")
    assert not reads_device_memory("tcp")
    monkeypatch.setattr(mooncake, "CUDA_WHEELS", ("no-such-wheel",))
    assert not reads_device_memory("mooncake")


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
