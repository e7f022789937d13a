"""Between the messages of the ranks' channel and what the pipeline and the threads speak."""

from collections.abc import Sequence

from ..core import events
from ..core import instructions as do
from ..errors import GroupLost
from ..types import ByteRange
from ..wire import ranks as wire
from .pixels import Pixels


def job_header(job: do.Job, pixels: Pixels) -> wire.JobHeader:
    item = job.item
    return wire.JobHeader(
        entry=job.entry,
        request_id=item.request_id,
        index=item.index,
        room=item.room,
        key=item.key,
        modality=item.modality,
        n_tokens=item.layout.n_tokens,
        cost=item.cost,
        extents=tuple((extent.start, extent.stop) for extent in job.extents),
        grids=tuple((grid.t, grid.h, grid.w) for grid in pixels.grids),
        dtype=pixels.dtype,
        shape=pixels.shape,
    )


def ranges_of(pairs: Sequence[wire.Range]) -> tuple[ByteRange, ...]:
    return tuple(ByteRange(*pair) for pair in pairs)


def event_of(message: wire.FromFollower) -> events.Event:
    """What a follower has answered. Raises GroupLost."""
    match message:
        case wire.Encoded():
            return events.BatchEncoded(message.batch, message.failures)
        case wire.Failed():
            return events.BatchFailed(message.batch, message.reason)
        case wire.Demoted():
            return events.Demoted(message.entry)
        case wire.DemoteFailed():
            return events.DemoteFailed(message.entry, message.reason)
        case wire.Written():
            return events.Written(message.write)
        case wire.WriteFailed():
            return events.WriteFailed(message.write, message.reason, message.may_land_late)
        case wire.WriteSettled():
            return events.WriteSettled(message.write, message.by_probe)
    raise GroupLost(f"{type(message).__name__} is no answer")


def message_of(event: events.Event) -> wire.FromFollower:
    """The same, on the follower."""
    match event:
        case events.BatchEncoded():
            return wire.Encoded(event.batch, dict(event.failures))
        case events.BatchFailed():
            return wire.Failed(event.batch, event.reason)
        case events.Demoted():
            return wire.Demoted(event.entry)
        case events.DemoteFailed():
            return wire.DemoteFailed(event.entry, event.reason)
        case events.Written():
            return wire.Written(event.write)
        case events.WriteFailed():
            return wire.WriteFailed(event.write, event.reason, event.may_land_late)
        case events.WriteSettled():
            return wire.WriteSettled(event.write, event.by_probe)
    raise GroupLost(f"{event} is no answer")
