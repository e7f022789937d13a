"""One row of the table of settings: its type, default, help and range, and what follows from them."""

from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

ENV_PREFIX = "ENCODEPOOL_"

Value = str | int | float


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: a setting with its type, default, help and range."""

    name: str
    type: type[str] | type[int] | type[float]
    default: Value
    group: str
    help: str
    choices: tuple[str, ...]
    minimum: float | None
    above: float | None
    maximum: float | None
    metavar: str

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def kind(self) -> str:
        """What a value must be, in words."""
        return {str: "a text", int: "a whole number", float: "a number"}[self.type]

    def parse(self, given: Value) -> Value:
        """Raises ValueError where the text is no value of this type."""
        if isinstance(given, bool):
            raise ValueError(given)
        if self.type is int and isinstance(given, float):
            raise ValueError(given)
        value = self.type(given)
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(given)
        return value

    def problems(self, value: Value) -> list[str]:
        """Why ``value`` cannot be used; empty if it can."""
        if not isinstance(value, self.type if self.type is not float else (int, float)) or isinstance(
            value, bool
        ):
            return [f"{self.name} must be {self.kind}, is {value!r}"]
        if self.choices and value not in self.choices:
            return [f"{self.name} must be one of {', '.join(self.choices)}, is {value!r}"]
        if isinstance(value, str):
            return [] if "\0" not in value else [f"{self.name} must not contain a zero byte"]
        if self.minimum is not None and value < self.minimum:
            return [f"{self.name} must be at least {self.minimum:g}, is {value:g}"]
        if self.above is not None and value <= self.above:
            return [f"{self.name} must be above {self.above:g}, is {value:g}"]
        if self.maximum is not None and value > self.maximum:
            return [f"{self.name} must be at most {self.maximum:g}, is {value:g}"]
        return []


def setting(
    default: Value,
    group: str,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    metavar: str = "",
) -> Any:
    """One row of the table. ``minimum`` and ``maximum`` are allowed values, ``above`` is not."""
    return field(
        default=default,
        metadata={
            "group": group,
            "help": text,
            "choices": choices,
            "minimum": minimum,
            "above": above,
            "maximum": maximum,
            "metavar": metavar,
        },
    )


def rows_of(settings: Any) -> tuple[Setting, ...]:
    """The rows of a dataclass whose fields were all made by ``setting``."""
    return tuple(
        Setting(name=f.name, type=f.type, default=f.default, **f.metadata)  # type: ignore[arg-type]
        for f in fields(settings)
    )


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")
