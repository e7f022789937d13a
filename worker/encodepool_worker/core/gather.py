"""One answer of several ranks: what the pipeline hears when all of them have carried out an order.

The pipeline knows one tower and one store. Every rank has its part of the tower and a copy of the
store, so RunBatch and Demote are carried out by all; here their answers become the one that the
pipeline waits for. What failed on any rank has failed.
"""

from collections.abc import Iterable

from ..errors import WorkerError
from .events import BatchEncoded, BatchFailed, Demoted, DemoteFailed
from .instructions import Demote, RunBatch

Order = RunBatch | Demote
Answer = BatchEncoded | BatchFailed | Demoted | DemoteFailed


class Gather:
    """Bounded by the orders that are given. Not thread-safe."""

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self._open: dict[tuple[type[Order], int], dict[int, Answer]] = {}

    def __len__(self) -> int:
        """Orders that wait for an answer."""
        return len(self._open)

    def begin(self, order: Order) -> None:
        """Before the order goes to the ranks."""
        self._open[_key(order)] = {}

    def add(self, rank: int, answer: Answer) -> Answer | None:
        """The answer of all once the last rank has given its own. Raises WorkerError for a stray one."""
        key = _key(answer)
        answers = self._open.get(key)
        if answers is None or rank in answers or not 0 <= rank < self._n_ranks:
            raise WorkerError(f"rank {rank} gave an answer that nobody waits for: {answer}")
        answers[rank] = answer
        if len(answers) < self._n_ranks:
            return None
        del self._open[key]
        return _fold([answers[rank] for rank in range(self._n_ranks)])


def _key(thing: Order | Answer) -> tuple[type[Order], int]:
    if isinstance(thing, RunBatch | BatchEncoded | BatchFailed):
        return RunBatch, thing.batch
    return Demote, thing.entry


def _fold(answers: list[Answer]) -> Answer:
    """The answers are in the order of the ranks, and all to the same order."""
    refused = [a.reason for a in answers if isinstance(a, BatchFailed | DemoteFailed)]
    first = answers[0]
    if isinstance(first, Demoted | DemoteFailed):
        return DemoteFailed(first.entry, _joined(refused)) if refused else Demoted(first.entry)
    failures: dict[int, str] = {}
    for answer in answers:
        if isinstance(answer, BatchEncoded):
            for entry, why in answer.failures.items():
                failures.setdefault(entry, why)
    if refused:
        # A rank that refuses items keeps the others from the batch: why it does comes first.
        return BatchFailed(first.batch, _joined([*failures.values(), *refused]))
    return BatchEncoded(first.batch, failures)


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reason or "failed" for reason in reasons))
