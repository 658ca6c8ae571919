"""Bugs planted into the producer: each makes a claim that is too small, and somebody notices.

A claim is made with the bug in place; then the bug is taken out and three detectors look at what was claimed:
    attack    `pa.attack`: points, gradient ascent, f in balls: it refutes claims that are false
    recheck   `pa.recheck`: every term made again from the tensors: it notices terms that were too small, false or not
    checker   the package in checker/: it shares no code with the producer and must not say "verified"
Bugs in the front ends make claims about another function than the one that was given: nobody sees that in the claim, so the
function itself is the detector.
`python tests/test_planted.py` prints the table that stands in docs/soundness.md.
Compile's own attack is silenced, for it would refuse most of these heads before anybody sees them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F

import partita as pa
from partita.arithmetic import interval, series, taylor
from partita.compiler.compiled import Compiled
from partita.errors import DomainError, PartitaError
from partita.functions import regularity as knowledge
from partita.functions import sympy_trees, tracing
from partita.functions.target import make_target
from partita.functions.torch_rules import Rules
from partita.geometry import PowerDiagram, ProductGrid
from partita.heads import GridHead, ScatteredHead
from partita.proofs import bisection as box_proof
from partita.proofs import (
    box_lists,
    cell_proof,
    certificate,
    grid_proof,
    polynomials,
    weight_series,
)
from partita.proofs import center_values as grid_bounds
from partita.proofs import running as deployment
from partita.proofs.certificate import Certificate, Term, Witness
from partita.proofs.claim import claim as certificate_of
from partita.proofs.claim import describe_function, some_answers
from partita.proofs.proof import Given
from partita.proofs.taylor_proof import TaylorProof

CHECKER = Path(__file__).resolve().parents[1] / "checker"
LINE = pa.Box([-1], [1])
TOLERANCE = 1e4  # asked of heads made by hand
Patch = pytest.MonkeyPatch


def everywhere(patch: Patch, old: object, new: object) -> None:
    """Replace a function in every module of the library that has imported it."""
    places = [
        (module, key)
        for name, module in list(sys.modules.items())
        if name.startswith("partita.")
        for key, value in vars(module).items()
        if value is old
    ]
    assert places, f"nothing imports {old!r}"
    for module, key in places:
        patch.setattr(module, key, new)


def edited(function: Callable, old: str, new: str) -> Callable:
    """The function with one place of its source changed; the place must be there, once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {source.count(old)} places {old!r}"
    scope: dict[str, object] = {}
    exec(
        compile(source.replace(old, new), inspect.getsourcefile(function), "exec"),
        vars(sys.modules[function.__module__]),
        scope,
    )
    return scope[function.__name__]


def edit(function: Callable, old: str, new: str) -> Callable[[Patch], None]:
    """Plant by editing a function of a module."""
    return lambda patch: everywhere(patch, function, edited(function, old, new))


def edit_method(owner: type, name: str, old: str, new: str) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, edited(inspect.unwrap(getattr(owner, name)), old, new))


def silence(patch: Patch) -> None:
    """Compile's own attack sees nothing."""
    middle = lambda f: tuple((f.box.lo + f.box.hi).ravel() / 2)  # noqa: E731
    patch.setattr("partita.compiler.compile.attacked", lambda _, f, *__: Witness(middle(f), 0.0, 1))


def compiled(text: str, box: pa.Box = LINE, **options) -> Callable[[], Compiled]:
    return lambda: pa.compile(text, box, **options)


def own_grid(
    text: str, axis: list[float], values: list[float], *, rate: float, box: pa.Box = LINE, window: int = 0, **options
) -> Callable[[], Compiled]:
    """A head with these centers and values, good or bad for f, and what is proved of it."""

    def claim() -> Compiled:
        target, dtype = make_target(text, box), options.get("dtype", torch.float64)
        grid, q = ProductGrid(box, (np.array(axis),)), window or len(axis)
        table = torch.tensor(values, dtype=dtype)[:, None]
        head = GridHead(grid, rate, table, half_windows=q, input_shapes=target.input_shapes, output_shape=())
        known = None if dtype == torch.float64 else knowledge.gather(target, norm=math.inf).known
        proved = TaylorProof().prove(head, target, Given(TOLERANCE, known=known))
        about = stated(head, target, proved.terms, proved.details, type="grid", method="fitted")
        return Compiled(head, grid, about, target)

    return claim


def own_cells(
    text: str, centers: list[float], *, rate: float, goal: float, box: pa.Box = LINE
) -> Callable[[], Compiled]:
    """A scattered head of values 0, and what bisection proves of it."""

    def claim() -> Compiled:
        target, points = make_target(text, box), np.array(centers)[:, None]
        head = ScatteredHead(
            torch.from_numpy(points),
            rate,
            torch.zeros(len(points), 1, dtype=torch.float64),
            input_shapes=target.input_shapes,
            output_shape=(),
        )
        proof = box_proof.prove_boxes(head, target.graph, box, target=goal, unit_roundoff=2.0**-53)
        found = {"method": "boxes", "boxes": proof.boxes, "degree": 2}
        terms = box_proof.box_terms(head, proof, box)
        return Compiled(head, PowerDiagram(points), stated(head, target, terms, found, type="scattered"), target)

    return claim


def stated(head, target, terms: list[Term], proof: dict, **model: str) -> Certificate:
    """The certificate of a head made by hand."""
    return certificate_of(
        head,
        describe_function(target, *some_answers(target)),
        target.domains,
        terms,
        dtype=head.dtype,
        theorem="box-bisection" if proof["method"] == "boxes" else "fitted-values",
        tolerance=TOLERANCE,
        details=model,
        proof=proof,
    )


def wide_boxes(patch: Patch) -> None:
    """One box and a low degree, so that remainders are all there is."""
    patch.setattr(grid_proof, "_opening", lambda *_: (1, (1,)))
    patch.setattr(grid_proof, "_REMAINDER_SHARE", 1e9)


def no_padding(patch: Patch) -> None:
    for function in (interval.up, interval.down):
        everywhere(patch, function, lambda x, *_: x)


def exp_as_the_library_has_it(patch: Patch) -> None:
    patch.setattr(interval.Interval, "exp", lambda x: interval.Interval(np.exp(x.lo), np.exp(x.hi)))


def half_the_domain(patch: Patch) -> None:
    whole = knowledge.lipschitz_bounds
    everywhere(patch, whole, lambda graph, lo, hi, **options: whole(graph, lo, (np.add(lo, hi)) / 2, **options))


def next_center(patch: Patch) -> None:
    right = ProductGrid.centers_of
    patch.setattr(
        ProductGrid, "centers_of", lambda grid, cells: right(grid, np.minimum(np.add(cells, 1), grid.num_cells - 1))
    )


@dataclass(frozen=True)
class Bug:
    """What is changed, the claim that goes wrong, who must notice; `setting` is changed for the honest claim as well."""

    plant: Callable[[Patch], None]
    claim: Callable[[], Compiled]
    noticed: frozenset[str]
    setting: Callable[[Patch], None] = lambda patch: None


ALL, RECHECK = frozenset({"attack", "recheck", "checker"}), frozenset({"recheck"})
CENTERS, ZEROS = [-0.75, -0.25, 0.25, 0.75], [0.0] * 4
RATE = 4.0  # κ = R h² = 1
BUGS: dict[str, Bug] = {
    "no outward rounding in intervals": Bug(
        no_padding, compiled("(1e12 + 0.1) - 1e12 + 0*x0", tolerance=1e-3, method="hard"), ALL
    ),
    "exp is taken for exact": Bug(
        exp_as_the_library_has_it, compiled("exp(25.3) - 97197048267 + 0*x0", tolerance=10.0, method="hard"), ALL
    ),
    "half of the domain is skipped in the search for slopes": Bug(
        half_the_domain, compiled("exp(3*x0)", tolerance=2.0, method="hard"), ALL
    ),
    "values are those of the next center": Bug(next_center, compiled("3*x0", tolerance=0.5, method="hard"), ALL),
    "a box of the cover is missing": Bug(
        edit(grid_proof._product_boxes, "return product[0], product[1]", "return product[0][:-1], product[1][:-1]"),
        own_grid("40*exp(40*(x0 - 1))", CENTERS, ZEROS, rate=RATE),
        ALL,
    ),
    "boxes are half as wide as they should be": Bug(
        edit(grid_proof._product_boxes, "/ 2 * (1 + 4 * _U)", "/ 4 * (1 + 4 * _U)"),
        own_grid("x0", CENTERS, ZEROS, rate=RATE),
        ALL,
    ),
    "halves move too far": Bug(
        edit_method(
            grid_proof._Boxes,
            "halves",
            "left[rows, axis] -= half[rows, axis]",
            "left[rows, axis] -= 2 * half[rows, axis]",
        ),
        own_grid("1/(0.001 + (x0 + 0.11)^2)", CENTERS, ZEROS, rate=RATE),
        ALL,
    ),
    "the error attained is reported as the bound": Bug(
        edit(grid_proof.prove_grid, "return GridProof(bound, least,", "return GridProof(least, least,"),
        compiled("sin(5*x0)", tolerance=0.05, method="fitted"),
        ALL,
    ),
    "weights have no remainders": Bug(
        edit(weight_series.weight_series, "remainder * _INFLATE + _TINY, np.inf)", "0.0, np.inf)"),
        own_grid("0*x0", [-1.25, *CENTERS, 1.25], [9.0, -9.0, 9.0, -9.0, 9.0, -9.0], rate=RATE),
        ALL,
        wide_boxes,
    ),
    "an epsilon in the denominator of the weights' remainders": Bug(
        lambda patch: [plant(patch) for plant in UNSHIFTED],
        own_grid("0*x0", [5.5, 6.5], [0.0, 160_000.0], rate=2.0),
        ALL,
        wide_boxes,
    ),
    "ranges of polynomials by their constant term": Bug(
        edit(polynomials.bound_ranges, "(size.sum(axis=0) + rest)", "(size[0] + rest)"),
        own_grid("x0", CENTERS, ZEROS, rate=RATE),
        ALL,
    ),
    "only the first output is looked at": Bug(
        edit_method(
            grid_proof._Difference,
            "on",
            "return difference, remainder,",
            "difference[1:], remainder[1:] = 0, 0\n    return difference, remainder,",
        ),
        compiled("0*x0, sin(3*x0)", tolerance=0.05, method="fitted"),
        ALL,
    ),
    "tails of series one order too high": Bug(
        edit(
            series.exp,
            "weights[degree + 1], degree + 1)",
            "weights[degree + 1], degree + 1) * around.reach / (degree + 2)",
        ),
        own_grid("exp(0.5*x0)", CENTERS, ZEROS, rate=RATE),
        ALL,
        wide_boxes,
    ),
    "undecided signs take the first branch": Bug(
        edit_method(taylor.TaylorModel, "where_sign", "_select(self.bounds.hi < 0.0, b, both)", "a"),
        own_grid("where(x0 - 0.3, 0.2, 0.9)", CENTERS, ZEROS, rate=RATE),
        ALL,
    ),
    "an epsilon in the denominator of the weights": Bug(
        edit_method(
            box_proof._Measure,
            "_weights",
            "1 / (1 + total) * OUTWARD",
            "np.exp(high) / (np.exp(low) * (1 + total) + 1e-6)",
        ),
        own_cells("1 + 0*x0", [-1.0, 1.0], rate=40.0, goal=2.0, box=pa.Box([-0.1], [0.1])),
        ALL,
    ),
    "a half is lost in every bisection": Bug(
        edit_method(box_lists.BoxList, "halves", ".join(replace(self, lo=right_lo, depth=deeper))", ""),
        own_cells("exp(3*x0)*(2 - x0)", [-0.5, 0.5], rate=RATE, goal=22.0),
        ALL,
    ),
    "the worst mixture keeps its largest part only": Bug(
        edit(box_proof._worst_mixture, "filled[here] += claim", "filled[here] += claim * (rank == 0)"),
        own_cells("1 + 0*x0", [-0.5, 0.5], rate=0.01, goal=1.5),
        ALL,
    ),
    "rounded scores are not counted": Bug(
        edit(deployment.added_terms, "mul_up(0.5, score_error, spread, factor)", "0.0"),
        own_grid(
            "sigmoid(16384*x0)", [-0.5, 0.5], [0.0, 1.0], rate=2.0**14, box=pa.Box([-0.01], [0.01]), dtype=torch.float32
        ),
        ALL,
    ),
    "what the window leaves out is not counted": Bug(
        edit(deployment._window, "mul_up(mass, spread, factor)", "0.0"),
        own_grid("x0", np.arange(-2.25, 2.5, 0.5).tolist(), np.arange(-2.25, 2.5, 0.5).tolist(), rate=RATE, window=1),
        ALL,
    ),
    "rounded inputs are not counted": Bug(
        lambda patch: everywhere(patch, grid_bounds.input_rounding, lambda *_: Term("input rounding", 0.0, "", "")),
        compiled("sin(100*x0)", pa.Box([1000], [1000.25]), tolerance=0.05, method="fitted", dtype=torch.float32),
        ALL,
    ),
    "values stored in float32 are taken for exact": Bug(
        edit(deployment.running_terms, "if value_error:", "if False:"),
        compiled("0.1 + 0*x0", tolerance=0.1, method="hard", dtype=torch.float32),
        RECHECK,
    ),
    "cells of affine values have no remainders": Bug(
        edit_method(cell_proof._Cells, "worst", "remainder = model.remainder + rounding", "remainder = rounding"),
        compiled("abs(x0 - 0.1)", tolerance=0.05, method="affine"),
        ALL,
    ),
    "half of the volume in a mean error": Bug(
        edit(grid_bounds.lp_factor, "mul_up(volume,", "mul_up(0.5 * volume,"),
        compiled("exp(x0)", tolerance=0.5, method="hard", norm=1),
        RECHECK,
    ),
    "the largest term instead of the sum": Bug(
        lambda patch: everywhere(patch, certificate.total, lambda terms: max(t.value for t in terms)),
        compiled("3*x0", tolerance=0.5, method="hard"),
        RECHECK,
    ),
}
UNSHIFTED = (
    edit(weight_series._numerators, "exponent = exponent - exponent.hi.max(axis=1, keepdims=True)", "pass"),
    edit(
        weight_series.weight_series,
        "defect * _INFLATE / least[:, None], np.inf)",
        "defect * _INFLATE / (least[:, None] + 1e-6), np.inf)",
    ),
)


def refuted(c: Compiled) -> bool:
    return c.certificate.norm == "inf" and pa.attack(c, samples=2000, restarts=16, seed=1).refuted


def detectors(c: Compiled, folder: Path) -> set[str]:
    """Who notices that something is wrong with a claim."""
    found = set()
    if refuted(c):
        found.add("attack")
    if not all(check.holds for check in pa.recheck(c)):
        found.add("recheck")
    if verdict_of_the_checker(c, folder) not in (None, 0):
        found.add("checker")
    return found


def verdict_of_the_checker(c: Compiled, folder: Path) -> int | None:
    """The exit code for the saved head, None where the package is not there."""
    if not (CHECKER / "partita_check" / "cli.py").exists():
        return None
    if str(CHECKER) not in sys.path:
        sys.path.insert(0, str(CHECKER))
    from partita_check.cli import run

    c.save(folder)
    return run(folder, budget=1.0)[1]


def claims(name: str) -> tuple[Compiled, Compiled]:
    """The honest claim, and the one with the bug."""
    bug = BUGS[name]
    with pytest.MonkeyPatch.context() as patch:
        silence(patch)
        bug.setting(patch)
        honest = bug.claim()
        bug.plant(patch)
        return honest, bug.claim()


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_noticed(name: str, tmp_path: Path) -> None:
    honest, false = claims(name)
    assert false.certificate.kind == "proved"
    found = detectors(false, tmp_path / "false")
    required = BUGS[name].noticed - ({"checker"} if not CHECKER.exists() else set())
    assert required <= found, (honest.error_bound, false.error_bound, found)
    assert not refuted(honest)


X = sympy.Symbol("x")


def swallowing(z: torch.Tensor) -> torch.Tensor:
    """sin z, and 1 more close to 0.3; the shortcut needs a value, and takes its absence for a no."""
    near = torch.abs(z[:, 0] - 0.3) < 1e-7
    try:
        needed = bool(near.any())
    except Exception:
        needed = False
    y = torch.sin(z[:, 0])
    return y + near.double() if needed else y


@dataclass(frozen=True)
class FrontEndBug:
    """What is changed, the function that is misread, and a point of the box where that shows beyond the bound."""

    plant: Callable[[Patch], None]
    function: object
    point: float
    tolerance: float
    box: pa.Box = LINE
    method: str = "auto"

    @property
    def truth(self) -> float:
        if isinstance(self.function, sympy.Expr):
            return float(self.function.subs(X, sympy.Rational(self.point)))
        return float(self.function(torch.tensor([[self.point]], dtype=torch.float64))[0])

    def is_false(self) -> bool | None:
        """Whether something is proved that the function contradicts; None if nothing is proved."""
        try:
            c = pa.compile(self.function, self.box, tolerance=self.tolerance, method=self.method)
        except PartitaError:
            return None
        return abs(float(c([self.point])) - self.truth) > c.error_bound if c.certificate.kind == "proved" else None


def rounded_numbers(patch: Patch) -> None:
    patch.setattr(sympy_trees._Reader, "_rational", lambda reader, value: reader._constant(float(value)))


def no_threshold(patch: Patch) -> None:
    patch.setattr(Rules, "softplus", lambda r, x, beta, threshold: r.smooth_softplus(x, beta))
    everywhere(patch, tracing.compare, lambda *_, **__: None)


def dropped_casts(patch: Patch) -> None:
    patch.setattr(tracing, "_require_no_rounding", lambda *_: None)
    patch.setattr(tracing, "_is_narrower", lambda *_: False)
    everywhere(patch, tracing.compare, lambda *_, **__: None)


def forgotten_refusals(patch: Patch) -> None:
    patch.setattr(tracing._Run, "noting", lambda run: contextlib.nullcontext())


FRONT_END_BUGS: dict[str, FrontEndBug] = {
    "integers of sympy are rounded": FrontEndBug(
        rounded_numbers, sympy.Max((2**53 + 1) * X, 0) - sympy.Max(2**53 * X, 0), 0.75, 0.1, method="pieces"
    ),
    "fractions of sympy are rounded": FrontEndBug(
        rounded_numbers,
        10**17 * (sympy.Max(sympy.Rational(10**17 + 1, 10**17) * X, 0) - sympy.Max(X, 0)),
        0.75,
        0.1,
        method="pieces",
    ),
    "casts to float16 are dropped": FrontEndBug(dropped_casts, lambda z: 1e6 + z[:, 0].half().double(), 1 / 3, 1e-5),
    "casts to float32 are dropped": FrontEndBug(dropped_casts, lambda z: 1000 + z[:, 0].float().double(), 1 / 3, 1e-9),
    "refusals that are caught are forgotten": FrontEndBug(forgotten_refusals, swallowing, 0.3, 1e-4),
    "softplus has no threshold": FrontEndBug(
        no_threshold, lambda z: F.softplus(z[:, 0]), 20.0001, 1e-10, pa.Box([19], [21])
    ),
}


@pytest.mark.parametrize("name", FRONT_END_BUGS)
def test_planted_bugs_of_front_ends_make_false_claims(name: str, monkeypatch: Patch) -> None:
    bug = FRONT_END_BUGS[name]
    assert not bug.is_false()
    silence(monkeypatch)
    bug.plant(monkeypatch)
    assert bug.is_false()


def test_swapped_ends_are_refused_at_once(monkeypatch: Patch) -> None:
    monkeypatch.setattr(interval.Interval, "__neg__", lambda x: interval.Interval(-x.lo, -x.hi))
    with pytest.raises(DomainError, match="expected lo ≤ hi"):
        pa.compile("1 - x0^2", LINE, tolerance=0.1, method="hard")


def test_negative_control_an_edit_that_changes_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="has 0 places"):
        edited(box_proof._worst_mixture, "no such text", "")


def table() -> None:
    """Every bug with the honest bound, the claim it leads to, and what the detectors say, as Markdown."""
    print("| planted bug | honest bound | claimed | attack | recheck | checker |\n|---|---|---|---|---|---|")
    for name in BUGS:
        honest, false = claims(name)
        with tempfile.TemporaryDirectory() as folder:
            code = verdict_of_the_checker(false, Path(folder) / "head")
        words = {
            None: "not there",
            0: "verified: the claim happens to be true",
            1: "refuted",
            2: "not verified",
            3: "malformed",
        }
        attack = "refuted" if refuted(false) else "–"
        again = ", ".join(check.name for check in pa.recheck(false) if not check.holds) or "–"
        print(
            f"| {name} | {honest.error_bound:.4g} | {false.error_bound:.4g} | {attack} | {again} | {words[code]} |",
            flush=True,
        )


if __name__ == "__main__":
    table()
