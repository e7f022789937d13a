"""docs/api.md, made from the same tables as the CRD and the parser."""

from collections.abc import Iterator

from . import labels, rules
from .crd import COLUMNS, PLURAL, SHORT_NAME
from .field import INT32_MAX, Field, Kind, Unset
from .fields import SPEC
from .names import NAME_LIMIT, NAME_PATTERN
from .status_fields import STATUS

HEAD = f"""# The resource EncodePool

Made from the tables in `operator/encodepool_operator/api` by
`python -m encodepool_operator.api.schema`, as `crds/encodepools.yaml` is; a test compares them.

API `{labels.API}`, kind `{labels.KIND}`, short name `{SHORT_NAME}`. A field that is left out has its
default; an empty text, list or object is the same as one that is left out. Unknown fields are refused
in local mode, and by the API server where the client asks for it (`kubectl` does).

`metadata.name` has at most {NAME_LIMIT} characters and matches `{NAME_PATTERN}`.
"""

SPEC_HEAD = """
## spec

The types in italics are Kubernetes' own. "pods" marks fields that reach the pods: a change of one is a
new revision, and groups are moved to it by the rollout's rules. A change of any other moves nothing.

| field | type | default | rule | pods | what it does |
|---|---|---|---|---|---|"""

RULES_HEAD = """
## Rules over several fields

| field | rule |
|---|---|"""

TEMPLATE = f"""
## podTemplate

`podTemplate.metadata` (labels, annotations) and `podTemplate.spec` are merged into the pods under what
the operator owns: where both say something, the operator's value stands. Containers, variables and
volumes are told apart by name, mounts by path, ports by number; tolerations and added capabilities are
put together, and so are rules of affinity; any other list is one value. The worker's container is
`{labels.CONTAINER}`. An init container or a sidecar can mount its volumes:

| volume | at | there |
|---|---|---|
| `encodepool-tmp` | `/tmp` | always |
| `encodepool-shm` | `/dev/shm` | unless `sharedMemory` is 0 |
| `encodepool-models` | `/models` | with `model.name`, or where `model.cache` says what it is |
"""

STATUS_HEAD = """
## status

Written by the operator alone.

| field | type | what it says |
|---|---|---|"""

COLUMNS_HEAD = f"""
## Columns of `kubectl get {PLURAL}`

| column | from | what it says |
|---|---|---|"""

ANNOTATIONS = f"""
## Annotations that users write on a pool

| annotation | what it does |
|---|---|
| `{labels.RESUME}` | Any new value starts the groups again that `restart.maxRestarts` has stopped. |
"""


def page() -> str:
    """The whole page."""
    out = [HEAD.rstrip("\n"), SPEC_HEAD]
    out += [_spec_row(path, field) for path, field in walk(SPEC)]
    out.append(RULES_HEAD)
    out += [f"| {_code(rule.path)} | {rule.message} |" for rule in rules.RULES]
    out += [f"| `spec.{fixed.key}` | {rules.Fixed.message} |" for fixed in rules.FIXED]
    out.append(TEMPLATE.rstrip("\n"))
    out.append(STATUS_HEAD)
    out += [f"| `{path}` | {type_of(field)} | {field.doc} |" for path, field in walk(STATUS)]
    out.append(COLUMNS_HEAD)
    out += [f"| {column.name} | `{column.path}` | {column.doc} |" for column in COLUMNS]
    out.append(ANNOTATIONS.rstrip("\n"))
    return "\n".join(out) + "\n"


def walk(field: Field, path: str = "") -> Iterator[tuple[str, Field]]:
    """(path below ``field``, field) of every field below it; items of a list stand at ``path[]``."""
    shape = field.shape
    if field.kind is Kind.LIST and field.item is not None:
        shape, path = field.item.shape, f"{path}[]"
    for part in shape.fields if shape is not None else ():
        where = f"{path}.{part.key}" if path else part.key
        yield where, part
        yield from walk(part, where)


def type_of(field: Field) -> str:
    """The field's type in a word or two."""
    match field.kind:
        case Kind.INTEGER:
            return "integer"
        case Kind.BOOLEAN:
            return "boolean"
        case Kind.STRING:
            return "string"
        case Kind.INT_OR_PERCENT:
            return "integer or percentage"
        case Kind.OBJECT:
            return "object"
        case Kind.STRING_MAP:
            return "map of strings"
        case Kind.NATIVE:
            return f"*{field.native}*"
        case Kind.LIST:
            assert field.item is not None
            return f"list of {type_of(field.item)}" + ("" if field.item.kind is Kind.NATIVE else "s")


def _spec_row(path: str, field: Field) -> str:
    pods = "" if field.kind is Kind.OBJECT or not field.pods else "yes"
    return f"| `{path}` | {type_of(field)} | {_default(field)} | {_rule(field)} | {pods} | {field.doc} |"


def _default(field: Field) -> str:
    if field.default is Unset.REQUIRED:
        return "required"
    if field.kind is Kind.OBJECT or isinstance(field.default, Unset) or field.default in ("", (), {}):
        return ""
    value = field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _rule(field: Field) -> str:
    match field.kind:
        case Kind.INTEGER:
            top = f" to {field.maximum}" if field.maximum < INT32_MAX else " or more"
            return f"{field.minimum}{top}"
        case Kind.INT_OR_PERCENT:
            return "0 or more, or 0% to 100%"
        case Kind.STRING if field.choices:
            return ", ".join(f"`{choice}`" for choice in field.choices)
        case Kind.STRING:
            least = f"{field.min_length} to " if field.min_length else "at most "
            return f"{least}{field.max_length} characters" + _pattern(field)
        case Kind.LIST:
            assert field.item is not None
            apart = f", told apart by {' and '.join(field.list_keys)}" if field.list_keys else ""
            each = f"; each {_rule(field.item)}" if field.item.kind is Kind.STRING else ""
            return f"at most {field.max_length} items{apart}{', no two equal' if field.unique else ''}{each}"
        case Kind.STRING_MAP:
            return f"at most {field.max_length} keys"
        case _:
            return ""


def _pattern(field: Field) -> str:
    return f", {_code(field.pattern)}" if field.pattern else ""


def _code(text: str) -> str:
    """As code in a cell of a table, where a bar would end the cell."""
    return f"`{text}`".replace("|", "\\|")
