"""Names of contents: a keyed BLAKE3 over everything that the rows of an item depend on.

Equal names must mean equal rows, so all of it goes in: model, revision, tower and preprocessing
facts through the key; modality, grids and every tensor's name, dtype, shape and bytes through the
message. Each part is preceded by its length, so no two inputs run together. The gateway's content
hash is not used: it names the image file and is the gateway's word only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from blake3 import blake3

from ..types import Grid, Modality, TowerSpec

KEY_CONTEXT = "encodepool 2026 names of encoded contents v1"
KEY_BYTES = 16

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor as it arrived: row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    payload: Buffer


class ContentKeys:
    """Makes keys for one model: all that stays the same between requests is in the secret key."""

    def __init__(self, *, model: str, revision: str, spec: TowerSpec, preprocessing: str) -> None:
        context = blake3(derive_key_context=KEY_CONTEXT)
        facts = ("model", model, "revision", revision, "tower", repr(astuple(spec)), "images", preprocessing)
        for fact in facts:
            _part(context, fact.encode())
        self._key = context.digest()

    def of(
        self, modality: Modality, grids: Sequence[Grid], pixels: TensorBytes, side: Iterable[TensorBytes]
    ) -> bytes:
        """16 bytes. Reads every byte given; releases the GIL while it does."""
        hasher = blake3(key=self._key)
        _part(hasher, modality.value.encode())
        _part(hasher, repr([astuple(grid) for grid in grids]).encode())
        for tensor in (pixels, *sorted(side, key=lambda tensor: tensor.name)):
            _part(hasher, tensor.name.encode())
            _part(hasher, tensor.dtype.encode())
            _part(hasher, repr(tensor.shape).encode())
            _part(hasher, tensor.payload)
        return hasher.digest(length=KEY_BYTES)


def _part(hasher: blake3, part: Buffer) -> None:
    nbytes = part.nbytes if isinstance(part, memoryview) else len(part)
    hasher.update(nbytes.to_bytes(8, "little"))
    hasher.update(part)
