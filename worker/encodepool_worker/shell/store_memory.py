"""The bytes of the store: one region a tier, allocated and registered once. The index is core's."""

import mmap
from collections.abc import Iterator, Sequence

import torch

from ..errors import ConfigError, WorkerError
from ..logs import get_logger
from ..transport.regions import Region
from ..types import ByteRange
from .tiers import TierPlan

MIB = 1024 * 1024


class StoreMemory:
    """The tiers' memory, page-aligned; offsets count through the tiers, end to end.

    Raises ConfigError when there is not that much memory. Copies from or to a GPU are under way
    when a method returns: its caller waits for them.
    """

    def __init__(self, tiers: Sequence[TierPlan]) -> None:
        self.names = tuple(tier.name for tier in tiers)
        self._memory = [_allocate(tier) for tier in tiers]
        self.regions = tuple(Region(flat.data_ptr(), flat.numel()) for flat in self._memory)
        self._pinned = [
            region for region, tier in zip(self.regions, tiers, strict=True) if tier.pinned and _pin(region)
        ]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tier: whole pages."""
        return tuple(region.nbytes for region in self.regions)

    @property
    def device(self) -> torch.device:
        """Of the first tier."""
        return self._memory[0].device

    def close(self) -> None:
        """Once nothing reads or writes it any more."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().ptr)  # type: ignore[no-untyped-call]

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
                target = self._bytes(start, count * size).view(part.dtype)
                _copy_elements(part, first, target)
                first, start, nbytes = first + count, start + count * size, nbytes - count * size

    def copy(self, source: Sequence[ByteRange], target: Sequence[ByteRange]) -> None:
        """What ``source`` holds, in order, into ``target``, which may be cut differently."""
        free = _free(target)
        at, room = next(free, (0, 0))
        for start, nbytes in _free(source):
            done = 0
            while done < nbytes:
                count = min(room, nbytes - done)
                if count == 0:
                    at, room = next(free, (0, 0))
                    if room == 0:
                        raise WorkerError("the target of a copy is smaller than its source")
                    continue
                self._bytes(at, count).copy_(self._bytes(start + done, count), non_blocking=True)
                done, at, room = done + count, at + count, room - count

    def read(self, extent: ByteRange) -> bytes:
        """What lies there now; for tests and tools."""
        return bytes(self._bytes(extent.start, extent.nbytes).cpu().numpy().tobytes())

    def _bytes(self, start: int, nbytes: int) -> torch.Tensor:
        """uint8 ``[nbytes]`` at an offset of the store."""
        for flat in self._memory:
            if start < flat.numel():
                return flat[start : start + nbytes]
            start -= flat.numel()
        raise WorkerError(f"the store has no {nbytes} bytes {start} beyond its end")


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


def _allocate(tier: TierPlan) -> torch.Tensor:
    """uint8, page-aligned: whole pages of at least ``tier.nbytes``."""
    page = mmap.PAGESIZE
    nbytes = -(-tier.nbytes // page) * page
    try:
        whole = torch.empty(nbytes + page, dtype=torch.uint8, device=tier.device)
    except RuntimeError as error:
        problem = f"the store cannot have {nbytes // MIB} MiB of {tier.name} memory ({error})"
        raise ConfigError([f"{problem}: lower store_device_mib or store_host_mib"]) from error
    start = -whole.data_ptr() % page
    return whole[start : start + nbytes]


def _pin(region: Region) -> bool:
    """Lock the pages for the GPU. torch's own pinned allocator would round up to a power of two."""
    code = int(torch.cuda.cudart().cudaHostRegister(region.ptr, region.nbytes, 0))  # type: ignore[no-untyped-call]
    if code != 0:
        get_logger().warning(
            "the store's memory cannot be pinned; copies from the GPU will be slower", cuda_error=code
        )
    return code == 0
