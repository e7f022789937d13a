"""Who may import whom. The tables are the documentation of the layers; the walk enforces them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "encodepool_operator": ROOT / "operator" / "encodepool_operator",
    "encodepool_worker": ROOT / "worker" / "encodepool_worker",
}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PURE = words(
    "abc bisect collections copy dataclasses difflib enum fractions functools hashlib heapq ipaddress"
    " itertools json math operator re string struct textwrap types typing urllib.parse"
)
"""Standard modules without input, output, clock, randomness or threads."""

STDLIB = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True)
class Layer:
    """What the modules of one layer may import.

    ``ours`` are layers of the same package ("" is its ``__init__``), ``outside`` top-level names of
    the standard library and of other packages. ``at_top`` restricts the imports that run when the
    module is imported; None means the same as ``outside``.
    """

    ours: frozenset[str]
    outside: frozenset[str]
    at_top: frozenset[str] | None = None
    forbidden: frozenset[str] = field(default_factory=frozenset)


def layer(ours: str, outside: frozenset[str], more: str = "", at_top: frozenset[str] | None = None) -> Layer:
    return Layer(words(ours), outside | words(more), at_top)


WORKER_ALL = (
    "types errors settings settings_table logs metrics child rundir core wire transport towers towers.spec"
    " towers.hub frontend shell supervisor client testing cli transport.choose"
)
NO_FRONTEND = " ".join(name for name in WORKER_ALL.split() if name not in ("frontend", "cli", "testing"))
FRONTEND_OUTSIDE = "grpc grpc_health grpc_reflection google smg_grpc_proto zmq aiohttp blake3 msgspec"
LOGS_AND_METRICS = " structlog prometheus_client"
TOWERS_OUTSIDE = "torch transformers safetensors numpy huggingface_hub tokenizers"
LIGHT = STDLIB | {"click", "yaml", "rich", "structlog", "msgspec"}

WORKER = {
    "errors": layer("", PURE),
    "types": layer("errors", PURE),
    "settings": layer("types errors settings_table settings_reference", STDLIB),
    "settings_table": layer("errors", PURE),
    "settings_reference": layer("", PURE),
    "logs": layer("", STDLIB, "structlog"),
    "metrics": layer("", PURE),
    "child": layer("errors", STDLIB),
    "rundir": layer("errors", STDLIB),
    "init_process": layer("", STDLIB),
    "core": layer("types errors core", PURE),
    "wire": layer("types errors wire", PURE, "msgspec"),
    "wire.encode": layer("types errors wire towers.spec", PURE, "msgspec smg_grpc_proto"),
    "transport": layer("types errors transport", STDLIB, "structlog"),
    # The backend is chosen in one place, and imported when it is chosen.
    "transport.choose": layer("errors transport transport.mooncake", STDLIB),
    "transport.mooncake": layer("types errors transport", STDLIB, "structlog mooncake"),
    "towers": layer("types errors towers towers.spec towers.hub", STDLIB, TOWERS_OUTSIDE),
    "towers.spec": layer("types errors", STDLIB),
    # Its use of towers lies in a function that the frontend does not call.
    "towers.hub": layer("errors towers", STDLIB, "huggingface_hub"),
    "frontend": layer(
        "types errors settings logs metrics child wire wire.encode towers.spec towers.hub frontend",
        STDLIB,
        FRONTEND_OUTSIDE + LOGS_AND_METRICS,
    ),
    "supervisor": layer("types errors settings logs child rundir", STDLIB, "structlog"),
    "shell": layer(NO_FRONTEND, STDLIB, "zmq torch numpy msgspec aiohttp" + LOGS_AND_METRICS),
    "client": layer(
        "types errors wire wire.encode transport transport.choose towers.spec client",
        STDLIB,
        "numpy PIL grpc google smg_grpc_proto zmq aiohttp msgspec structlog",
    ),
    # Commands import what is heavy when they run, so that --help is quick and says what is missing.
    "cli": layer(
        WORKER_ALL + " init_process", LIGHT, "torch transformers safetensors numpy PIL grpc", at_top=LIGHT
    ),
    "testing": layer(WORKER_ALL, STDLIB, TOWERS_OUTSIDE + " PIL pytest zmq msgspec"),
    "": layer("", PURE),
}

OPERATOR = {
    "api": layer("api", PURE, "msgspec"),
    # The tool that writes what is made from the tables; nobody imports it.
    "api.schema": layer("api", STDLIB, "yaml"),
    "core": layer("api core", PURE | {"datetime"}),
    "kube": layer("api kube", STDLIB, "aiohttp kubernetes structlog"),
    "local": layer("api core local", STDLIB, "yaml structlog aiohttp click msgspec"),
    "controller": layer("api core kube controller", STDLIB, "kopf aiohttp structlog prometheus_client"),
    "cli": layer("api core kube local controller cli", STDLIB, "click rich yaml structlog aiohttp"),
    "__main__": layer("cli", STDLIB),
    "": layer("", PURE),
}

CLOCK_CALLS = frozenset({"now", "utcnow", "today", "utcfromtimestamp"})
"""Of datetime: the core formats times that it is given, it does not ask for them."""

TABLES = {"encodepool_worker": WORKER, "encodepool_operator": OPERATOR}


def rule_of(module: str, table: dict[str, Layer]) -> str | None:
    """The longest name in ``table`` that is ``module`` or a package above it."""
    parts = module.split(".") if module else []
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in table:
            return name
    return "" if module == "" else None


def imports(tree: ast.Module, package: str, module: str, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute name, runs on import) of every import; `from x import y` counts as x.y."""
    inside_function = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    only_for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If)
        and ast.unparse(branch.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for part in branch.body
        for node in ast.walk(part)
    }
    here = f"{package}.{module}" if module else package
    for node in ast.walk(tree):
        at_top = id(node) not in inside_function and id(node) not in only_for_types
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, at_top
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = here.split(".")
                kept = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:kept], *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", at_top


def is_allowed(name: str, allowed: frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in allowed for length in range(1, len(parts) + 1))


def violations(source: str, package: str, module: str, is_package: bool = False) -> list[str]:
    """One line per import that ``module`` (without the package's name) must not make."""
    table = TABLES[package]
    name = rule_of(module, table)
    if name is None:
        return [f"{module}: belongs to no layer"]
    rule = table[name]
    out = []
    for line, imported, at_top in imports(ast.parse(source), package, module, is_package):
        top, _, inner = imported.partition(".")
        where = f"{module}:{line} imports {imported}"
        if top in PACKAGES and top != package:
            out.append(f"{where}: the two packages do not know each other")
        elif top == package:
            target = rule_of(inner, table)
            if target is None:  # a name in the package itself, such as its version
                target = ""
            if target and target != name and target not in rule.ours:
                out.append(f"{where}: {name or 'the package'} may not import {target}")
        elif not is_allowed(imported, rule.outside):
            out.append(f"{where}: not among what {name or 'the package'} may import")
        elif at_top and rule.at_top is not None and not is_allowed(imported, rule.at_top):
            out.append(f"{where}: import it inside the command that needs it")
    return out


def clock_calls(source: str) -> list[int]:
    """Lines that ask datetime for the time or the time zone of this machine."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in CLOCK_CALLS
        and ast.unparse(node.value).rpartition(".")[2] in ("datetime", "date")
    ]


def modules() -> Iterator[tuple[str, str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = list(path.relative_to(folder).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            yield package, ".".join(parts), path


def test_every_import_is_allowed():
    found = [
        f"{package}.{line}"
        for package, module, path in modules()
        for line in violations(path.read_text(), package, module, path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.pipeline", "import time"),
        ("core.pipeline", "from ..shell import loop"),
        ("core.pipeline", "def f():\n    import zmq"),
        ("core.room", "import encodepool_operator.api"),
        ("types", "from .core import events"),
        ("wire.control", "from smg_grpc_proto import tokenspeed_encoder_pb2"),
        ("transport.tcp", "from mooncake.engine import TransferEngine"),
        ("transport.sender", "from ..core.events import Written"),
        ("towers.spec", "import torch"),
        ("frontend.servicer", "import torch"),
        ("frontend.servicer", "from ..towers.load import load_tower"),
        ("shell.loop", "from ..frontend import admission"),
        ("client.receive", "from ..towers import load"),
        ("cli.serve", "import torch"),
        ("somewhere.new", ""),
    ],
)
def test_a_planted_import_is_caught(module, source):
    assert violations(source, "encodepool_worker", module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.pipeline", "from .room import Room\nfrom ..types import Item\nimport heapq"),
        ("transport.mooncake", "def f():\n    from mooncake.engine import TransferEngine"),
        ("frontend.servicer", "from ..towers.spec import read_tower_spec"),
        ("cli.rows", "import click\ndef rows():\n    import torch\n    from ..towers.load import load_tower"),
    ],
)
def test_what_the_layers_need_is_let_through(module, source):
    assert violations(source, "encodepool_worker", module) == []


@pytest.mark.parametrize("source", ["import time", "import random", "import encodepool_operator.local"])
@pytest.mark.parametrize("module", ["core.plan", "core.render.pods"])
def test_a_planted_import_in_the_core_of_the_operator_is_caught(module, source):
    assert violations(source, "encodepool_operator", module)


def test_both_cores_ask_for_no_time():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for _, module, path in modules()
        if module.split(".")[0] == "core"
        for line in clock_calls(path.read_text())
    ]
    assert not found, "\n".join(found)
    assert clock_calls("datetime.now(UTC)") == [1]


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("encodepool_worker.frontend.__main__", ("torch", "transformers", "mooncake")),
        ("encodepool_worker.client", ("torch", "transformers")),
        ("encodepool_worker.cli.main", ("torch", "transformers", "grpc", "mooncake")),
        ("encodepool_operator.cli.main", ("torch", "grpc", "encodepool_worker", "kopf", "kubernetes")),
        ("encodepool_operator.controller.run", ("torch", "grpc", "encodepool_worker")),
    ],
)
def test_nothing_heavy_is_loaded_on_the_way(module, banned):
    """The tables see one module; this sees everything that importing it pulls in."""
    code = f"import sys, {module}\nprint(*sorted(set({banned!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
