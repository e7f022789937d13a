"""What the tower that computes nothing promises; known without torch."""

from encodepool_worker.types import TowerSpec

MERGE = 2
PATCH_WIDTH = 24
"""Values of a patch: few, so that pixels weigh nothing beside the work on their item."""


def spec_of(hidden: int) -> TowerSpec:
    """A tower whose pixels are small and whose rows have ``hidden`` float32 values."""
    return TowerSpec(
        family="none",
        hidden=hidden,
        levels=0,
        dtype="float32",
        patch_width=PATCH_WIDTH,
        patch_size=2,
        temporal_patch_size=2,
        merge_size=MERGE,
        image_token_id=None,
        video_token_id=None,
    )
