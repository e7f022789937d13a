"""Copies rows from the store's first tier into its second, in a thread of its own.

Neither the loop nor the tower waits for a copy: the pipeline lets entries leave before their bytes
are needed, and gives those to nobody until the answer.
"""

import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..core.events import Demoted, DemoteFailed
from ..core.instructions import Demote
from ..errors import WorkerError
from ..logs import get_logger
from .store_memory import StoreMemory
from .threads import Crash, start_thread


class Mover:
    """One copy after the other; ``answer`` gets one event for each."""

    def __init__(
        self,
        memory: StoreMemory,
        answer: Callable[[Demoted | DemoteFailed], None],
        crash: Crash,
        *,
        max_orders: int,
    ) -> None:
        self._memory = memory
        self._answer = answer
        on_gpu = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._orders: queue.Queue[Demote | None] = queue.Queue(max_orders + 1)
        self._thread = start_thread("mover", self._run, crash)

    def submit(self, order: Demote) -> None:
        """Never waits. Raises queue.Full beyond ``max_orders``, which is a bug."""
        self._orders.put_nowait(order)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Carry out what was ordered; False if that takes longer."""
        self._orders.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._answer(self._copy(order))

    def _copy(self, order: Demote) -> Demoted | DemoteFailed:
        try:
            with self._own_stream(), torch.inference_mode():
                self._memory.copy(order.source, order.target)
            if self._stream:
                self._stream.synchronize()
        except (WorkerError, RuntimeError) as error:  # a lost device is noticed by the tower's thread
            get_logger().warning("rows could not be moved to the second tier", problem=str(error))
            return DemoteFailed(order.entry, str(error))
        return Demoted(order.entry)

    def _own_stream(self) -> AbstractContextManager[object]:
        """Apart from the tower's work on the device."""
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()
