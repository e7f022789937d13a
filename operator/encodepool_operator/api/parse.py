"""A mapping (from YAML or JSON) becomes an EncodePool, or every problem with its field path.

Defaults, bounds and unknown keys come from the table in ``fields``; what needs more than one field
is in ``rules``. Nothing is written back: derived values exist only in the result.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from . import labels, names
from .field import INT32_MAX, Field, Kind, Unset
from .fields import SPEC
from .rules import derive, spec_problems
from .types import EncodePool, IntOrPercent, Metadata, Spec

PERCENT = re.compile(r"(100|[1-9]?[0-9])%")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to change: where, and what is required there."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class InvalidPool(ValueError):
    """The manifest cannot be used. ``problems`` is complete and in the manifest's field order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def parse_pool(document: Any) -> EncodePool:
    """The pool of a whole manifest (apiVersion, kind, metadata, spec). Raises InvalidPool."""
    if not isinstance(document, Mapping):
        raise InvalidPool([Problem("(document)", f"must be an object, is {_kind_of(document)}")])
    reader = _Reader()
    for key, wanted in (("apiVersion", labels.API), ("kind", labels.KIND)):
        if document.get(key) != wanted:
            reader.add(key, f"must be {wanted}, is {_shown(document.get(key))}")
    reader.unknown_keys("", document, ("apiVersion", "kind", "metadata", "spec", "status"))
    metadata = reader.metadata(document.get("metadata"))
    spec = reader.spec(document.get("spec", {}))
    if reader.problems or metadata is None or spec is None:
        raise InvalidPool(reader.problems)
    return EncodePool(metadata, spec)


def parse_spec(value: Any) -> Spec:
    """The spec alone, with the same checks. Raises InvalidPool."""
    reader = _Reader()
    spec = reader.spec(value)
    if reader.problems or spec is None:
        raise InvalidPool(reader.problems)
    return spec


def _kind_of(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "a boolean"
    for types, word in (
        ((int, float), "a number"),
        (str, "a string"),
        (Mapping, "an object"),
        (list, "a list"),
    ):
        if isinstance(value, types):
            return word
    return f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    """A scalar as it stands in the manifest, cut to a readable length; else its kind."""
    if value is None or isinstance(value, Mapping | list):
        return _kind_of(value)
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _inside(path: str, other: str) -> bool:
    """Whether ``path`` is ``other`` or a part of it."""
    return path == other or path.startswith((f"{other}.", f"{other}["))


def _left_out(field: Field) -> Any:
    """The value of a field that the manifest does not give."""
    if field.kind is Kind.OBJECT and field.default is not None:
        assert field.shape is not None
        return field.shape.make(**{part.attribute: _left_out(part) for part in field.shape.fields})
    if isinstance(field.default, Unset):
        return "" if field.kind is Kind.STRING else None
    return field.default


class _Reader:
    """Walks a document along the table and collects problems instead of stopping at the first."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))

    def unknown_keys(self, path: str, value: Mapping[Any, Any], known: Sequence[str]) -> None:
        for key in value:
            if key in known:
                continue
            close = get_close_matches(str(key), known, n=1, cutoff=0.6)
            same = [name for name in known if name.lower() == str(key).lower()]
            hint = f"; did you mean {(same or close)[0]}?" if same or close else ""
            self.add(f"{path}.{key}" if path else str(key), f"unknown field{hint}")

    def metadata(self, value: Any) -> Metadata | None:
        """Only what the operator uses is read; the API server owns the rest."""
        if not isinstance(value, Mapping):
            self.add("metadata", f"must be an object, is {_kind_of(value)}")
            return None
        count = len(self.problems)
        name = value.get("name", "")
        if not isinstance(name, str):
            self.add("metadata.name", f"must be a string, is {_shown(name)}")
        elif wrong := names.name_problem(name):
            self.add("metadata.name", wrong)
        texts: dict[str, str] = {}
        for key, default in (("namespace", "default"), ("uid", "")):
            texts[key] = value.get(key, default)
            if not isinstance(texts[key], str):
                self.add(f"metadata.{key}", f"must be a string, is {_shown(texts[key])}")
        maps = {
            key: self.string_map(f"metadata.{key}", value.get(key) or {}, INT32_MAX)
            for key in ("labels", "annotations")
        }
        generation = value.get("generation", 0)
        if not isinstance(generation, int) or isinstance(generation, bool):
            self.add("metadata.generation", f"must be an integer, is {_shown(generation)}")
        if len(self.problems) > count:
            return None
        return Metadata(
            name, texts["namespace"], texts["uid"], generation, maps["labels"], maps["annotations"]
        )

    def spec(self, value: Any) -> Spec | None:
        """The checked spec. Fields with problems stand at their defaults while the rules look at it;
        what the rules say about such a field is not reported."""
        count = len(self.problems)
        spec = self.read("spec", SPEC, value)
        wrong = [problem.path for problem in self.problems[count:]]
        assert isinstance(spec, Spec)
        for path, message in spec_problems(spec):
            if not any(_inside(path, other) or _inside(other, path) for other in wrong):
                self.add(path, message)
        return derive(spec) if len(self.problems) == count else None

    def read(self, path: str, field: Field, value: Any) -> Any:
        """The checked value; after a problem, the field's default."""
        count = len(self.problems)
        checked = self.checked(path, field, value)
        if len(self.problems) == count or field.kind in (Kind.OBJECT, Kind.LIST):
            return checked
        return _left_out(field)

    def checked(self, path: str, field: Field, value: Any) -> Any:
        match field.kind:
            case Kind.INTEGER:
                return self.integer(path, field, value)
            case Kind.BOOLEAN:
                if not isinstance(value, bool):
                    self.add(path, f"must be true or false, is {_shown(value)}")
                return value
            case Kind.STRING:
                return self.string(path, field, value)
            case Kind.INT_OR_PERCENT:
                return self.int_or_percent(path, value)
            case Kind.LIST:
                return self.list_of(path, field, value)
            case Kind.STRING_MAP:
                return self.string_map(path, value, field.max_length, field.item)
            case Kind.NATIVE:
                if not isinstance(value, Mapping):
                    self.add(path, f"must be an object, is {_shown(value)}")
                return value
            case Kind.OBJECT:
                return self.object_of(path, field, value)

    def object_of(self, path: str, field: Field, value: Any) -> Any:
        """As if left out when it cannot be made: not an object, or a required key is missing."""
        assert field.shape is not None
        shape = field.shape
        if not isinstance(value, Mapping):
            self.add(path, f"must be an object, is {_shown(value)}")
            return _left_out(field)
        self.unknown_keys(path, value, [field.key for field in shape.fields])
        values: dict[str, Any] = {}
        for part in shape.fields:
            where = f"{path}.{part.key}"
            given = value.get(part.key)
            if given is not None:
                values[part.attribute] = self.read(where, part, given)
            elif part.default is Unset.REQUIRED:
                self.add(where, "is required")
            else:  # "key:" without a value in YAML is a key that is left out
                values[part.attribute] = _left_out(part)
        return shape.make(**values) if len(values) == len(shape.fields) else _left_out(field)

    def integer(self, path: str, field: Field, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            self.add(path, f"must be an integer, is {_shown(value)}")
        elif not field.minimum <= value <= field.maximum:
            self.add(path, f"must be between {field.minimum} and {field.maximum}, is {value}")
        return value

    def string(self, path: str, field: Field, value: Any) -> Any:
        if not isinstance(value, str):
            self.add(path, f"must be a string, is {_shown(value)}")
        elif field.choices and value not in field.choices:
            self.add(path, f"must be one of {', '.join(field.choices)}, is {_shown(value)}")
        elif not field.min_length <= len(value) <= field.max_length:
            self.add(path, f"must have {field.min_length} to {field.max_length} characters, has {len(value)}")
        elif value and field.pattern and not re.fullmatch(field.pattern, value):
            self.add(path, f"must match {field.pattern}, is {_shown(value)}")
        return value

    def int_or_percent(self, path: str, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32_MAX:
            return IntOrPercent(value)
        if isinstance(value, str) and PERCENT.fullmatch(value):
            return IntOrPercent(int(value[:-1]), percent=True)
        self.add(path, f"must be a number of groups or a share from 0% to 100%, is {_shown(value)}")
        return None

    def list_of(self, path: str, field: Field, value: Any) -> Any:
        assert field.item is not None
        if not isinstance(value, list | tuple):
            self.add(path, f"must be a list, is {_shown(value)}")
            return ()
        if len(value) > field.max_length:
            self.add(path, f"must have at most {field.max_length} items, has {len(value)}")
            return ()
        return tuple(self.read(f"{path}[{i}]", field.item, item) for i, item in enumerate(value))

    def string_map(self, path: str, value: Any, max_length: int, item: Field | None = None) -> dict[str, str]:
        if not isinstance(value, Mapping):
            self.add(path, f"must be an object, is {_shown(value)}")
            return {}
        if len(value) > max_length:
            self.add(path, f"must have at most {max_length} keys, has {len(value)}")
        for key, text in value.items():
            if not isinstance(key, str) or not isinstance(text, str):
                self.add(f"{path}.{key}", f"must be a string, is {_shown(text)}")
            elif item is not None:
                self.string(f"{path}.{key}", item, text)
        return dict(value)
