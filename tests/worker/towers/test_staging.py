"""Pixels on their way to the device, in small pieces: on a CPU without pinning and streams."""

import pytest
import torch

from encodepool_worker.towers.staging import PixelStager, copy_stream

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [[1], [4], [5, 3], [2, 2, 2], [17, 1, 8]])
def test_rows_arrive_in_order_and_cast_once(dtype, rows):
    width = 6
    stager = PixelStager(CPU, dtype, width, chunk_bytes=4 * width * dtype.itemsize)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(n, width, generator=generator) for n in rows]

    arrived = stager.put(parts)

    assert torch.equal(arrived, torch.cat(parts).to(dtype))
    kept = arrived.clone()
    stager.put([part + 1 for part in parts])
    assert torch.equal(arrived, kept)


def test_rows_may_go_where_the_caller_says():
    stager = PixelStager(CPU, torch.float32, 2, chunk_bytes=16)
    out = torch.full((5, 2), 9.0)

    arrived = stager.put([torch.ones(1, 2), torch.zeros(2, 2)], out)

    assert arrived.data_ptr() == out.data_ptr()
    assert out.tolist() == [[1, 1], [0, 0], [0, 0], [9, 9], [9, 9]]


def test_a_row_may_be_wider_than_a_piece():
    stager = PixelStager(CPU, torch.float32, 100, chunk_bytes=1)

    assert torch.equal(stager.put([torch.ones(3, 100)]), torch.ones(3, 100))


def test_a_cpu_needs_no_stream():
    with copy_stream(CPU):
        target = torch.zeros(2).copy_(torch.ones(2), non_blocking=True)

    assert target.tolist() == [1, 1]
