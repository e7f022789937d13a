"""What a field of the resource is: its type, default, bounds and a sentence for the documentation.

``pods`` says whether the value reaches the pods of a group: a change of one that does is a new revision
and a rollout, a change of one that does not (replicas, rollout rules ...) moves nothing.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

INT32_MAX = 2**31 - 1


class Kind(Enum):
    INTEGER = auto()
    BOOLEAN = auto()
    STRING = auto()
    INT_OR_PERCENT = auto()
    OBJECT = auto()
    LIST = auto()
    STRING_MAP = auto()
    NATIVE = auto()
    """An object in a type of Kubernetes, passed on as it is; ``native`` names the type."""


class Unset(Enum):
    """Default of a field that has none: it may be left out and is then filled in by a rule."""

    UNSET = auto()
    REQUIRED = auto()


@dataclass(frozen=True, slots=True)
class Field:
    """One key of an object. Bounds are inclusive; lengths count characters, items or keys.

    ``attr`` is the attribute of the Python type when it is not the key in snake case.
    ``item`` describes the items of a LIST or the values of a STRING_MAP, ``shape`` the keys of an
    OBJECT. Items of a LIST are told apart by ``list_keys``, or must differ where ``unique``.
    """

    key: str
    kind: Kind
    doc: str
    default: Any = Unset.UNSET
    minimum: int = 0
    maximum: int = INT32_MAX
    min_length: int = 0
    max_length: int = 253
    pattern: str = ""
    choices: tuple[str, ...] = ()
    item: "Field | None" = None
    shape: "Shape | None" = None
    pods: bool = True
    attr: str = ""
    native: str = ""
    list_keys: tuple[str, ...] = ()
    unique: bool = False

    @property
    def attribute(self) -> str:
        if self.attr:
            return self.attr
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in self.key)


@dataclass(frozen=True, slots=True)
class Shape:
    """The keys of an object and the Python type made from them."""

    make: type
    fields: tuple[Field, ...]
