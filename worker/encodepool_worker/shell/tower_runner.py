"""Runs the tower: one batch at a time, in a thread of its own, always with exactly one answer."""

import queue
import time
from collections.abc import Callable

import torch

from ..core.events import BatchEncoded, BatchFailed
from ..core.instructions import Job, RunBatch
from ..errors import GroupLost, TowerError, WorkerError
from ..logs import get_logger
from ..towers.base import TowerItem, VisionTower, finite_rows, item_tokens
from ..towers.parallel import TensorParallel
from ..towers.staging import copy_stream
from .metrics import Metrics
from .pixels import PixelTable
from .store_memory import StoreMemory
from .threads import Crash, start_thread


class TowerRunner:
    """Pixels -> tower -> rows in their entries. ``answer`` gets one event for each batch.

    One bad item fails alone where that can be told: wrong pixels before the tower, rows that are
    not finite after it. Whatever else the tower raises fails the batch, and the pipeline tries its
    items one by one. A device that is lost ends the process (``crash``).

    Of several ranks (``parallel``) each runs every batch, and votes once for it whatever happens
    to it here; ranks that lost each other end. Whether all of them have stored the rows is known
    from their answers.
    """

    def __init__(
        self,
        tower: VisionTower,
        pixels: PixelTable,
        memory: StoreMemory,
        answer: Callable[[BatchEncoded | BatchFailed], None],
        metrics: Metrics,
        crash: Crash,
        parallel: TensorParallel | None = None,
    ) -> None:
        self._tower = tower
        self._parallel = parallel
        self._pixels = pixels
        self._memory = memory
        self._answer = answer
        self._metrics = metrics
        self._crash = crash
        self._orders: queue.SimpleQueue[RunBatch | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = start_thread("tower", self._run, crash)

    def submit(self, order: RunBatch) -> None:
        """Never waits: there is one batch at a time."""
        self._orders.put(order)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Wait for the batch under way; False if it is still running (a tower cannot be interrupted)."""
        self._closing = True
        self._orders.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            started_s = time.monotonic()
            answer = self._encode(order)
            seconds = time.monotonic() - started_s
            self._count(order, seconds)
            self._answer(answer)

    def _encode(self, order: RunBatch) -> BatchEncoded | BatchFailed:
        try:
            with torch.inference_mode():
                return BatchEncoded(order.batch, self._fill(order))
        except GroupLost as error:
            reason = str(error)
            if not self._closing:  # at the end the other ranks leave a batch that takes too long
                self._crash(reason)
        except WorkerError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 (handed on)
            get_logger().exception("a batch failed", batch=order.batch)
            reason = f"the tower failed: {error!r}"
        self._check_device(reason)
        return BatchFailed(order.batch, reason)

    def _fill(self, order: RunBatch) -> dict[int, str]:
        """Run the batch and fill its entries; returns {entry: why it was not filled}."""
        failures: dict[int, str] = {}
        jobs: list[Job] = []
        items: list[TowerItem] = []
        try:
            for job in order.jobs:
                try:
                    items.append(self._item(job))
                    jobs.append(job)
                except WorkerError as error:
                    failures[job.entry] = str(error)
        except Exception:
            self._abstain()
            raise
        if not jobs:
            self._abstain()
            return failures
        rows = self._tower.encode(items, batch=order.batch)
        counts = [job.item.layout.n_tokens for job in jobs]
        if tuple(rows.shape) != (sum(counts), self._tower.row_width):
            raise TowerError(
                f"the tower returned {tuple(rows.shape)}, wanted {(sum(counts), self._tower.row_width)}"
            )
        hidden = self._tower.spec.hidden
        start = 0
        finite = finite_rows(rows, counts)
        with copy_stream(rows.device):  # left when the copies have ended: a write must not overtake them
            for job, sound in zip(jobs, finite, strict=True):
                part = rows[start : start + job.item.layout.n_tokens]
                start += job.item.layout.n_tokens
                if not sound:
                    failures[job.entry] = "the tower's rows are not finite"
                    continue
                halves = (part[:, :hidden], part[:, hidden:]) if job.item.layout.levels else (part,)
                self._memory.put(job.extents, halves)
        return failures

    def _abstain(self) -> None:
        """Instead of the tower, so that the other ranks do not wait for this one."""
        if self._parallel is not None:
            self._parallel.agree(False)

    def _item(self, job: Job) -> TowerItem:
        """Raises WorkerError for what is wrong with this item alone."""
        try:
            pixels = self._pixels.get(job.pixels)
        except KeyError:
            raise TowerError(f"the pixels of room {job.item.room} are gone") from None
        spec, layout = self._tower.spec, job.item.layout
        if (layout.hidden, layout.levels, layout.dtype) != (spec.hidden, spec.levels, spec.dtype):
            raise TowerError(
                f"rows as {layout} were promised, the tower makes {spec.layout(layout.n_tokens)}"
            )
        item = TowerItem(pixels.tensor(), pixels.grids)
        n_tokens = item_tokens(spec, item)
        if n_tokens != layout.n_tokens:
            raise TowerError(f"{layout.n_tokens} rows were promised, the grids make {n_tokens}")
        return item

    def _check_device(self, reason: str) -> None:
        """After some CUDA errors every later call fails: then only a new process helps."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            self._crash(f"the device is lost: {error}; it began with: {reason}")

    def _count(self, order: RunBatch, seconds: float) -> None:
        self._metrics.add("encodepool_tower_seconds_total", seconds)
        self._metrics.add("encodepool_batches_total")
        self._metrics.add("encodepool_batch_items_total", len(order.jobs))
        self._metrics.add("encodepool_batch_tokens_total", _cost(order))


def _cost(order: RunBatch) -> int:
    return sum(job.item.cost for job in order.jobs)
