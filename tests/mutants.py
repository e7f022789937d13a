"""``make mutants``: what the pure tests notice. Changes one place of the two cores or the wire at a time.

    python -m tests.mutants [--count 200] [--seed 1] [--against EARLIER.json]

Each mutant is one run of the pure tests of its package, which must fail. The choice depends on the sources
and the seed alone, so two sets of tests can be held against the same mutants: with ``--against``, one that
was killed there and survives here is an error. No file is changed: this module is also a pytest plugin
that hands the changed module to the import system.
"""

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".mutants.json"
VARIABLE = "ENCODEPOOL_MUTANT"
"""MODULE:NUMBER of the mutant that this process is to run."""

TIMEOUT_S = 300.0
"""A loop without an end is noticed too."""

PURE_TESTS = {
    "operator/encodepool_operator/core": "tests/operator/core",
    "worker/encodepool_worker/core": "tests/worker/core",
    "worker/encodepool_worker/wire": "tests/worker/wire",
}

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class Mutator(ast.NodeTransformer):
    """Counts the places where something can be changed; changes number ``target``."""

    def __init__(self, target: int = -1) -> None:
        self.target = target
        self.count = 0
        self.changed = ""

    def _is_it(self, node: ast.AST, what: str) -> bool:
        self.count += 1
        if self.count - 1 != self.target:
            return False
        self.changed = f"{getattr(node, 'lineno', 0)} {what}"
        return True

    def _swap(self, node: ast.AST, operator: ast.AST) -> ast.AST:
        other = OPERATORS.get(type(operator))
        if other and self._is_it(node, f"{type(operator).__name__} -> {other.__name__}"):
            return other()
        return operator

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        node.ops = [self._swap(node, operator) for operator in node.ops]  # type: ignore[misc]
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        node.op = self._swap(node, node.op)  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        node.op = self._swap(node, node.op)  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        node.op = self._swap(node, node.op)  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not) and self._is_it(node, "not dropped"):
            return node.operand
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._is_it(node, "if -> if not"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._is_it(node, f"{node.value} -> {not node.value}"):
                return ast.Constant(not node.value)
        elif isinstance(node.value, int) and self._is_it(node, f"{node.value} -> {node.value + 1}"):
            return ast.Constant(node.value + 1)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call) and self._is_it(node, "call dropped"):
            return ast.Pass()
        return self.generic_visit(node)

    # What says nothing about behaviour: types, decorators, assertions.

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def _without_decorators(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        decorators, node.decorator_list = node.decorator_list, []
        returns = getattr(node, "returns", None)
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        self.generic_visit(node)
        node.decorator_list = decorators
        if isinstance(node, ast.FunctionDef):
            node.returns = returns
        return node

    visit_FunctionDef = visit_ClassDef = _without_decorators


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str
    number: int
    changed: str

    @property
    def package(self) -> str:
        return next(folder for folder in PURE_TESTS if self.path.startswith(folder))

    @property
    def module(self) -> str:
        name = self.path.split("/", 1)[1].removesuffix(".py").replace("/", ".")
        return name.removesuffix(".__init__")

    def __str__(self) -> str:
        return f"{self.path}:{self.changed}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_text()
    counter = Mutator()
    counter.visit(ast.parse(source))
    for number in range(counter.count):
        mutator = Mutator(number)
        mutator.visit(ast.parse(source))
        yield Mutant(str(path.relative_to(ROOT)), number, mutator.changed)


def choose(count: int, seed: int) -> list[Mutant]:
    paths = [path for folder in PURE_TESTS for path in sorted((ROOT / folder).rglob("*.py"))]
    everything = [mutant for path in paths for mutant in mutants_of(path)]
    return random.Random(seed).sample(everything, count)


# --- inside the run of a mutant


class Finder(importlib.abc.MetaPathFinder):
    """Finds one module where it is, and compiles it changed."""

    def __init__(self, module: str, number: int) -> None:
        self._module = module
        self._number = number

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = Changed(name, spec.origin, self._number)
        return spec


class Changed(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, number: int) -> None:
        super().__init__(name, path)
        self._number = number

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        tree = ast.parse(Path(self.path).read_text())
        changed = ast.fix_missing_locations(Mutator(self._number).visit(tree))
        return compile(changed, self.path, "exec")


if VARIABLE in os.environ and __name__ != "__main__":
    module, _, number = os.environ[VARIABLE].partition(":")
    sys.meta_path.insert(0, Finder(module, int(number)))


# --- the runs


def run_tests(folder: str, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants"]
    return subprocess.run(
        [*command, "--hypothesis-seed=0", folder],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def is_killed(mutant: Mutant) -> bool:
    """Whether its tests fail, or do not end. Raises RuntimeError where pytest could not run them."""
    try:
        done = run_tests(PURE_TESTS[mutant.package], {VARIABLE: f"{mutant.module}:{mutant.number}"})
    except subprocess.TimeoutExpired:
        return True
    # 1: tests failed. 2 and 4: a test module or a conftest could not even be imported.
    if done.returncode not in (0, 1, 2, 4):
        raise RuntimeError(f"{mutant}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode != 0


def run(chosen: Sequence[Mutant]) -> dict[Mutant, bool]:
    killed: dict[Mutant, bool] = {}
    started_s = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {pool.submit(is_killed, mutant): mutant for mutant in chosen}
        for number, done in enumerate(as_completed(runs), 1):
            mutant = runs[done]
            killed[mutant] = done.result()
            word = "killed" if killed[mutant] else "SURVIVED"
            left_s = (time.monotonic() - started_s) / number * (len(chosen) - number)
            print(f"{number:4}/{len(chosen)} {word:8} {mutant}  ({left_s / 60:.0f} min left)", flush=True)
    return killed


def report(killed: dict[Mutant, bool]) -> None:
    print(f"\n{'package':40} {'mutants':>8} {'killed':>8}")
    for folder in PURE_TESTS:
        here = [is_dead for mutant, is_dead in killed.items() if mutant.package == folder]
        print(f"{folder:40} {len(here):8} {sum(here):8}")
    print(f"{'together':40} {len(killed):8} {sum(killed.values()):8}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--against", type=Path, help="results of an earlier run, such as .mutants.json")
    given = parser.parse_args()
    earlier = json.loads(given.against.read_text()) if given.against else {}
    for folder in PURE_TESTS.values():
        done = run_tests(folder, {})
        if done.returncode != 0:
            print(f"{folder} fails without a mutant:\n{done.stdout[-4000:]}", file=sys.stderr)
            return 2
        print(f"{folder}: {done.stdout.splitlines()[-1]}", flush=True)
    killed = run(choose(given.count, given.seed))
    report(killed)
    results = {str(mutant): is_dead for mutant, is_dead in sorted(killed.items(), key=str)}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {RESULTS.name}")
    revived = [name for name, is_dead in results.items() if not is_dead and earlier.get(name)]
    if revived:
        print("killed before, alive now:", *revived, sep="\n  ")
        return 1
    if earlier:
        same = len(earlier.keys() & results.keys())
        print(f"none of the {same} mutants of {given.against} that was killed survives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
