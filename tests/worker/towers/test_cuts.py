"""Parts of tensors: the same values whether they are read from a file or cut from the whole."""

import pytest
import torch
from safetensors.torch import save_file

from encodepool_worker.towers.cut import Cut
from encodepool_worker.towers.tensor_file import TensorFile

CASES = [
    Cut((6, 4), 0, ((2, 5),)),
    Cut((6, 4), 0, ((0, 1), (2, 3), (4, 5))),
    Cut((6, 4), 1, ((1, 3),)),
    Cut((6, 4), 1, ((0, 1), (3, 4))),
    Cut((6,), 0, ((3, 6),)),
    Cut((6, 4, 2), 1, ((1, 4),)),
    Cut((6, 4), 1, ((2, 2),)),
]


@pytest.mark.parametrize("cut", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_read_as_it_would_be_cut(tmp_path, cut, dtype):
    before, whole = torch.full((3,), 7, dtype=dtype), torch.randn(cut.whole).to(dtype)
    save_file({"a": before, "b": whole}, tmp_path / "t.safetensors")
    wanted = torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in cut.ranges], cut.dim)

    with TensorFile(tmp_path / "t.safetensors") as file:
        part = file.read("b", cut)

        assert torch.equal(file.read("b"), whole)
    assert part.shape == cut.shape
    assert torch.equal(part, wanted)
    assert torch.equal(cut.of(whole), wanted)
    assert part.untyped_storage().nbytes() == wanted.numel() * dtype.itemsize
