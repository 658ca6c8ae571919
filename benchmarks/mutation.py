"""Mutation testing of the files that bounds rest on: small changes of the source that some test must notice.

python benchmarks/mutation.py --minutes 20                          # a sample of all files
python benchmarks/mutation.py --file proofs/bisection.py --sample 0  # every mutant of one file
python benchmarks/mutation.py --list --file arithmetic/series.py     # the mutants, not run

A mutant changes one place: a comparison, + and −, a number, min and max, up and down, a term or factor dropped, arguments
swapped. It is run on a copy of the package in a temporary folder, in a forked process with a time limit; it is killed when a
test fails or does not end. What survives is listed: equivalent, harmless (bounds get larger), or a hole in the tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.dont_write_bytecode = True

ROOT = Path(__file__).resolve().parents[1]
PROOFS = ("tests/test_laws.py", "tests/test_grid_proof.py")
BOXES = ("tests/test_laws.py", "tests/test_planted.py")
TERMS = ("tests/test_laws.py", "tests/test_bounds.py", "tests/test_planted.py")
ENCLOSURES = ("tests/test_primitives.py", "tests/test_rounding.py", "tests/test_interval.py")
MODELS = ("tests/test_primitives.py", "tests/test_taylor.py")
TESTS: dict[str, tuple[str, ...]] = {
    "proofs/weight_series.py": PROOFS,
    "proofs/polynomials.py": PROOFS,
    "proofs/grid_proof.py": PROOFS,
    "proofs/bisection.py": BOXES,
    "proofs/box_lists.py": BOXES,
    "proofs/center_values.py": TERMS,
    "proofs/running.py": TERMS,
    "proofs/cover_proof.py": TERMS,
    "arithmetic/rounding.py": ENCLOSURES,
    "arithmetic/interval.py": ENCLOSURES,
    "arithmetic/dual.py": ENCLOSURES,
    "arithmetic/series.py": MODELS,
    "arithmetic/polynomial.py": MODELS,
    "arithmetic/taylor.py": MODELS,
    "arithmetic/defects.py": MODELS,
}
_COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
}
_COMPARISONS |= {ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,)}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_NAMES = {
    "min": "max",
    "minimum": "maximum",
    "fmin": "fmax",
    "up": "down",
    "lo": "hi",
    "argmax": "argmin",
    "ceil": "floor",
}
_NAMES |= {f"{name}_up": f"{name}_down" for name in ("add", "sub", "mul", "div", "sqrt", "exp", "log", "pow")}
_NAMES |= {other: name for name, other in _NAMES.items()}


@dataclass(frozen=True)
class Mutant:
    """One change: the file below partita/, the line, what kind it is, the line before and after, and the new source."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: `{self.before}` → `{self.after}`"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The kinds of change that a node allows, with the node as it would be."""
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            for other in _COMPARISONS.get(type(operator), ()):
                new = copy.deepcopy(node)
                new.ops[number] = other()
                yield "comparison", new
    elif isinstance(node, ast.BinOp):
        if type(node.op) in _ARITHMETIC:
            new = copy.deepcopy(node)
            new.op = _ARITHMETIC[type(node.op)]()
            yield "operator", new
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            yield "dropped right", copy.deepcopy(node.left)
        if isinstance(node.op, ast.Add | ast.Mult):
            yield "dropped left", copy.deepcopy(node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield "dropped sign", copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for value in (
            {node.value + 1, node.value - 1} if type(node.value) is int else {2 * node.value, node.value / 2, 0.0}
        ):
            if value != node.value:
                yield "number", ast.Constant(value)
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield "name", ast.Name(_NAMES[node.id], node.ctx)
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES:
        new = copy.deepcopy(node)
        new.attr = _NAMES[node.attr]
        yield "name", new
    elif isinstance(node, ast.Call) and len(node.args) == 2 and not _is_symmetric(node):
        new = copy.deepcopy(node)
        new.args.reverse()
        yield "swapped arguments", new


_SYMMETRIC = {"min", "max", "minimum", "maximum", "fmin", "fmax", "add_up", "add_down", "mul_up", "mul_down"}


def _is_symmetric(call: ast.Call) -> bool:
    """Whether swapping the arguments changes nothing, or cannot be done."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in _SYMMETRIC or any(isinstance(argument, ast.Starred) for argument in call.args)


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else super().visit(node)


def _is_prose(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Messages, annotations, imports and `__all__` are not what bounds are made of."""
    while node in parents:
        parent = parents[node]
        if isinstance(parent, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.AnnAssign):
            return not (isinstance(parent, ast.AnnAssign) and node is parent.value)
        if isinstance(parent, ast.FunctionDef) and (node is parent.returns or node is parent.args):
            return True
        node = parent
    return False


def mutants(file: str, sample: int = 0, seed: int = 0) -> list[Mutant]:
    """All mutants of a file, or a random sample of so many."""
    tree = ast.parse((ROOT / "partita" / file).read_text())
    for node in ast.walk(tree):  # docstrings go: they hold no code
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            and ast.get_docstring(node)
            and len(node.body) > 1
        ):
            node.body = node.body[1:]
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno") and not _is_prose(node, parents)]
    places = [(node, kind, new) for node in nodes for kind, new in changes(node)]
    if sample:
        places = random.Random(f"{seed} {file}").sample(places, min(sample, len(places)))
    plain, found = ast.unparse(tree).splitlines(), []
    for node, kind, new in places:
        source = ast.unparse(_Swap(node, new).visit(tree))
        _Swap(new, node).visit(tree)  # back again
        changed = [(a, b) for a, b in zip(plain, source.splitlines()) if a != b]
        for before, after in changed[:1]:
            found.append(Mutant(file, node.lineno, kind, before.strip()[:110], after.strip()[:110], source))
    return found


def copied() -> Path:
    """A copy of the package, its tests and its checker, without anything compiled."""
    folder = Path(tempfile.mkdtemp(prefix="mutants_"))
    skip = shutil.ignore_patterns("__pycache__", "*.pyc", "images")
    for name in ("partita", "tests", "checker", "docs"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def verdict(folder: Path, tests: tuple[str, ...], seconds: int) -> str:
    """`survived`, `killed` or `timeout`: the tests in a forked process, which starts with the libraries loaded."""
    child = os.fork()
    if child == 0:
        try:
            _run_tests(folder, tests, seconds)
        finally:
            os._exit(99)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL) else "killed"
    return "survived" if os.WEXITSTATUS(status) == 0 else "killed"


def _run_tests(folder: Path, tests: tuple[str, ...], seconds: int) -> None:
    import resource

    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    signal.alarm(10 * seconds)
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    there = [t for t in tests if (folder / t).exists()]
    code = pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:faulthandler", *there])
    inside = Path(sys.modules["partita"].__file__).is_relative_to(folder)
    os._exit(int(code) if inside else 98)


def preload() -> None:
    """Everything that is slow to import and not under test."""
    import flint  # noqa: F401
    import numba  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import scipy.sparse
    import scipy.spatial
    import scipy.special  # noqa: F401
    import threadpoolctl  # noqa: F401
    import torch

    torch.set_num_threads(1)


def survey(
    files: list[str], sample: int, minutes: float, seconds: int, seed: int
) -> tuple[dict[str, Counter[str]], list[Mutant]]:
    """How the sampled mutants of each file fared, and the survivors; files take turns until the time is spent."""
    preload()
    queues = {file: mutants(file, sample, seed) for file in files}
    folder, end = copied(), time.monotonic() + 60 * minutes
    counts: dict[str, Counter[str]] = {file: Counter() for file in files}
    survivors: list[Mutant] = []
    try:
        for tests in {TESTS[file] for file in files}:
            if verdict(folder, tests, 20 * seconds) != "survived":
                raise SystemExit(f"{', '.join(tests)} fail without a mutant")
        while any(queues.values()) and time.monotonic() < end:
            for file in [f for f in files if queues[f]]:
                mutant, place = queues[file].pop(), folder / "partita" / file
                original = place.read_text()
                place.write_text(mutant.source)
                fate = verdict(folder, TESTS[file], seconds)
                place.write_text(original)
                counts[file][fate] += 1
                survivors += [mutant] if fate == "survived" else []
                print(f"{fate:9} {mutant}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    return counts, survivors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", action="append", choices=sorted(TESTS), help="below partita/; all if not given")
    parser.add_argument("--sample", type=int, default=20, help="mutants per file, 0 for all")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after so long")
    parser.add_argument("--seconds", type=int, default=60, help="processor time for one mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    given = parser.parse_args()
    files = given.file or list(TESTS)
    if given.list:
        for file in files:
            print("\n".join(map(str, mutants(file))))
        return
    counts, survivors = survey(files, given.sample, given.minutes, given.seconds, given.seed)
    print("| file | mutants run | killed | no end | survived |\n|---|---|---|---|---|")
    for file, found in counts.items():
        print(f"| {file} | {found.total()} | {found['killed']} | {found['timeout']} | {found['survived']} |")
    print("\nSurvivors:")
    for mutant in survivors:
        print(f"- {mutant}")


if __name__ == "__main__":
    main()
