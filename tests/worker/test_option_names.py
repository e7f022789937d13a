"""Every option that is set on gRPC, ZMQ and Mooncake has a name that the library itself knows.

gRPC and Mooncake take any name and ignore what they do not know. So the names are held against the strings
of the libraries that are installed here.
"""

import ast
import mmap
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import files
from pathlib import Path

import grpc._cython.cygrpc
import pytest
import zmq

from encodepool_worker.frontend.grpc_server import server_options
from encodepool_worker.transport.mooncake import wanted_environment

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("worker", "operator", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")
)
GRPC_LIBRARIES = [Path(grpc._cython.cygrpc.__file__)]
MOONCAKE = re.compile(r"(MC|GLOG)_\w+")
MENTIONS = re.compile(r"['\"]grpc\.|\bzmq\.|\b(MC|GLOG)_")
SOCKET_CALLS = {"setsockopt", "getsockopt", "setsockopt_string", "getsockopt_string", "set", "get"}


def mooncake_libraries() -> list[Path]:
    """Of whichever wheel is installed, with what it bundles."""
    for wheel in ("", "-non-cuda", "-cuda13"):
        try:
            installed = files(f"mooncake-transfer-engine{wheel}")
        except ModuleNotFoundError:
            continue
        return [Path(str(file.locate())) for file in installed or [] if ".so" in file.name]
    return []


def unknown(names: set[str], libraries: list[Path]) -> list[str]:
    """Names that no library has as a string of its own."""
    assert names, "nothing is set: then there is nothing to compare"
    assert libraries, "no library was found"
    left = set(names)
    for library in libraries:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            left = {name for name in left if content.find(name.encode() + b"\0") < 0}
    return sorted(left)


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Of the sources that may set an option; this one has misspelt names."""
    sources = ((path, path.read_text()) for path in SOURCES if path != Path(__file__).resolve())
    return [(path, ast.parse(text)) for path, text in sources if MENTIONS.search(text)]


def constants() -> Iterator[str]:
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def grpc_options() -> set[str]:
    """The first of every pair ``("grpc.something", value)``."""
    return {
        node.elts[0].value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple)
        and len(node.elts) == 2
        and isinstance(node.elts[0], ast.Constant)
        and isinstance(node.elts[0].value, str)
        and node.elts[0].value.startswith("grpc.")
    }


def zmq_options() -> Iterator[tuple[str, int, str]]:
    """(file, line, name) of every option that is set on or read from a socket or a context."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in SOCKET_CALLS
                and node.args
                and ast.unparse(node.args[0]).startswith("zmq.")
            ):
                yield str(path.relative_to(ROOT)), node.lineno, ast.unparse(node.args[0]).removeprefix("zmq.")


def test_grpc_knows_every_option_by_its_name():
    names = grpc_options()
    assert {name for name, _ in server_options(1)} <= names, "the search in the sources misses options"
    assert unknown(names, GRPC_LIBRARIES) == []


def test_zmq_knows_every_option_by_its_name():
    known = {*zmq.SocketOption.__members__, *zmq.ContextOption.__members__}
    used = list(zmq_options())
    assert ("worker/encodepool_worker/shell/status_sender.py", "LINGER") in {(f, n) for f, _, n in used}
    assert [f"{file}:{line} zmq.{name}" for file, line, name in used if name not in known] == []


def test_mooncake_knows_every_variable_by_its_name():
    names = {value for value in constants() if MOONCAKE.fullmatch(value)}
    assert names >= {*wanted_environment("tcp", 1.0), *wanted_environment("rdma", 1.0)}
    assert unknown(names, mooncake_libraries()) == []


@pytest.mark.parametrize(
    ("name", "libraries"),
    [
        # What cut idle connections of gateways for a while.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", GRPC_LIBRARIES),
        ("MC_TRANSFER_TIMEOUT_SEC", mooncake_libraries()),
    ],
)
def test_a_misspelt_name_is_found(name, libraries):
    assert unknown({name}, libraries) == [name]
