"""The bytes of the store: one region, allocated and registered once. The index is core's."""

import mmap
from collections.abc import Iterator, Sequence

import torch

from ..errors import ConfigError, WorkerError
from ..logs import get_logger
from ..types import ByteRange

MIB = 1024 * 1024


class StoreMemory:
    """``nbytes`` of host memory, page-aligned, pinned where a GPU copies into it.

    Raises ConfigError when there is not that much memory.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        page = mmap.PAGESIZE
        nbytes = -(-nbytes // page) * page
        whole = _allocate(nbytes + page)
        start = -whole.data_ptr() % page
        self._region = whole[start : start + nbytes]
        self.ptr: int = self._region.data_ptr()
        self.nbytes = nbytes
        self._pinned = pinned and _pin(self.ptr, nbytes)

    @classmethod
    def of(cls, device_bytes: int, host_bytes: int, *, pinned: bool) -> "StoreMemory":
        """Both sizes as one tier: rows are written from host memory whatever made them."""
        if device_bytes and host_bytes:
            get_logger().info(
                "the store has one tier: both sizes are added",
                store_device_mib=device_bytes // MIB,
                store_host_mib=host_bytes // MIB,
            )
        return cls(device_bytes + host_bytes, pinned=pinned)

    def close(self) -> None:
        """Once nothing reads or writes it any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.ptr)  # type: ignore[no-untyped-call]
            self._pinned = False

    def put(self, extents: Sequence[ByteRange], parts: Sequence[torch.Tensor]) -> None:
        """Copy the parts, one after another and row by row, into the extents: the only copy there is.

        Parts are ``[rows, columns]`` of one dtype; columns are adjacent, rows may be apart (halves
        of one matrix). Their bytes must fill the extents, or end in the last one.
        """
        wanted = sum(part.numel() * part.element_size() for part in parts)
        if wanted > sum(extent.nbytes for extent in extents):
            raise WorkerError(f"{wanted} bytes of rows do not fit the {len(extents)} extents they are for")
        free = _free(extents)
        start, nbytes = next(free, (0, 0))
        for part in parts:
            first, size = 0, part.element_size()
            while first < part.numel():
                count = min(nbytes // size, part.numel() - first)
                if count == 0:
                    start, nbytes = next(free)
                    continue
                target = self._region[start : start + count * size].view(part.dtype)
                _copy_elements(part, first, target)
                first, start, nbytes = first + count, start + count * size, nbytes - count * size

    def read(self, extent: ByteRange) -> bytes:
        """What lies there now; for tests and tools."""
        return bytes(self._region[extent.start : extent.stop].numpy().tobytes())


def _free(extents: Sequence[ByteRange]) -> Iterator[tuple[int, int]]:
    """(start, bytes) of each extent."""
    for extent in extents:
        yield extent.start, extent.nbytes


def _copy_elements(rows: torch.Tensor, first: int, target: torch.Tensor) -> None:
    """Elements [first, first + len(target)) of ``rows``, counted row by row, into flat ``target``.

    At most three copies: the rest of a row, whole rows, the beginning of a row.
    """
    columns = rows.shape[1]
    done, count = 0, target.numel()
    while done < count:
        row, column = divmod(first + done, columns)
        if column or count - done < columns:
            step = min(columns - column, count - done)
            target[done : done + step].copy_(rows[row, column : column + step], non_blocking=True)
        else:
            n_rows = (count - done) // columns
            step = n_rows * columns
            target[done : done + step].view(n_rows, columns).copy_(
                rows[row : row + n_rows], non_blocking=True
            )
        done += step


def _allocate(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        problem = f"the store cannot have {nbytes // MIB} MiB ({error})"
        raise ConfigError([f"{problem}: lower store_device_mib or store_host_mib"]) from error


def _pin(ptr: int, nbytes: int) -> bool:
    """Lock the pages for the GPU. torch's own pinned allocator would round up to a power of two."""
    code = int(torch.cuda.cudart().cudaHostRegister(ptr, nbytes, 0))  # type: ignore[no-untyped-call]
    if code != 0:
        get_logger().warning(
            "the store's memory cannot be pinned; copies from the GPU will be slower", cuda_error=code
        )
    return code == 0
