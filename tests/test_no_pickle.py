"""Nothing in the packages turns bytes from outside into code or arbitrary objects.

Bytes from a socket or a file become typed values only through msgspec, json, protobuf, safetensors
and the parsers of ``wire``.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BANNED_MODULES = words("pickle _pickle cPickle cloudpickle dill joblib shelve marshal multiprocessing")
"""Each runs code while it reads, or (multiprocessing) pickles between its processes."""

BANNED_CALLS = words("eval exec compile __import__ recv_pyobj send_pyobj recv_serialized load_pickle")

BANNED_ATTRIBUTES = frozenset(
    {"torch.load", "torch.hub", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}
)


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def safe_loaders(tree: ast.Module) -> set[str]:
    """PyYAML's safe loaders, and classes of this module that derive from nothing else."""
    safe = {"yaml.SafeLoader", "yaml.CSafeLoader"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.bases and all(dotted(base) in safe for base in node.bases):
            safe.add(node.name)
    return safe


def is_safe_yaml(call: ast.Call, safe: set[str]) -> bool:
    """``yaml.load(text, Loader)`` with a safe loader."""
    loaders = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "Loader")]
    return dotted(call.func) in ("yaml.load", "yaml.load_all") and [dotted(x) in safe for x in loaders] == [
        True
    ]


def findings(source: str) -> list[str]:
    """One line per banned import, call or keyword in ``source``."""
    out = []
    tree = ast.parse(source)
    safe = safe_loaders(tree)
    harmless = {
        id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and is_safe_yaml(node, safe)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if BANNED_MODULES & set(name.split(".")) or name in BANNED_ATTRIBUTES:
                out.append(f"line {node.lineno}: imports {name}")
        if (
            isinstance(node, ast.Attribute)
            and id(node) not in harmless
            and (dotted(node) in BANNED_ATTRIBUTES or node.attr in ("recv_pyobj", "send_pyobj"))
        ):
            out.append(f"line {node.lineno}: uses {ast.unparse(node)}")
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in BANNED_CALLS or (
                name.startswith("importlib") and any(word in ast.unparse(node) for word in BANNED_MODULES)
            ):
                out.append(f"line {node.lineno}: calls {name}")
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if (keyword.arg, value) in {("allow_pickle", "True"), ("weights_only", "False")}:
                    out.append(f"line {node.lineno}: passes {keyword.arg}={value}")
    return out


def test_nothing_unpickles_or_evaluates():
    found = [
        f"{path.relative_to(ROOT)} {line}"
        for folder in ("operator", "worker")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in findings(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import multiprocessing.shared_memory",
        "from multiprocessing import Pipe",
        "from torch.multiprocessing import spawn",
        "from torch import load",
        "socket.recv_pyobj()",
        "self.socket.send_pyobj(message)",
        "f = socket.recv_pyobj",
        "torch.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text)",
        "class L(yaml.UnsafeLoader): ...\nyaml.load_all(text, L)",
        "class L(yaml.SafeLoader, Other): ...\nyaml.load(text, L)",
        "from yaml import unsafe_load",
        "eval(text)",
        "exec(text)",
        "importlib.import_module('pickle')",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_a_planted_case_is_found(planted):
    assert findings(planted)


@pytest.mark.parametrize(
    "harmless",
    [
        "yaml.safe_load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "class L(yaml.SafeLoader): ...\nyaml.load_all(text, L)",
        "numpy.load(path)",
        "re.compile(text)",
        "model.eval()",
        "from .load import load_tower",
    ],
)
def test_harmless_code_is_not_found(harmless):
    assert findings(harmless) == []
