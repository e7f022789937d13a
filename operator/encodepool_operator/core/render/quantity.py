"""Resource quantities as numbers: ``500m`` is 0.5, ``1Gi`` is ``1024Mi``."""

import re
from fractions import Fraction
from typing import Any

_PATTERN = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,2})|([KMGTPE]i|[numkMGTPE]))?")

_SCALES = {
    **{f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Fraction(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{letter: Fraction(1, 1000) ** power for power, letter in enumerate("mun", 1)},
}


def amount(quantity: Any) -> Fraction:
    """Raises ValueError for what is no quantity."""
    match = _PATTERN.fullmatch(str(quantity)) if not isinstance(quantity, bool) else None
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity")
    digits, exponent, suffix = match.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SCALES[suffix] if suffix else Fraction(1)
    return Fraction(digits) * scale


def same(one: Any, other: Any) -> bool:
    """Whether both are quantities of the same amount."""
    try:
        return amount(one) == amount(other)
    except ValueError:
        return False
