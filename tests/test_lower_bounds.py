"""What more heads cannot do: the lower bounds against linear programs, explicit approximations and brute force."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import partita as pa
from partita.errors import DomainError, NothingKnownError, UnsupportedError
from partita.functions.target import make_target
from partita.papers import additive_gap, least_numbers, product_gap
from partita.reproduction.structured_functions import KNOWN_FUNCTIONS, bell_of, sines_of


def cube(m):
    return pa.Box([-1.0] * m, [1.0] * m)


def nearest_sum(values, points, reads):
    """The least `max |f − Σ g|` on these points over all sums of functions of `reads` coordinates, by a linear program."""
    columns = {}
    for point in points:
        for chosen in itertools.combinations(range(points.shape[1]), reads):
            columns.setdefault((chosen, tuple(point[list(chosen)])), len(columns))
    matrix = np.zeros((len(points), len(columns)))
    for row, point in enumerate(points):
        for chosen in itertools.combinations(range(points.shape[1]), reads):
            matrix[row, columns[chosen, tuple(point[list(chosen)])]] = 1
    ones = np.ones((len(points), 1))
    solved = linprog(
        np.append(np.zeros(len(columns)), 1.0),
        A_ub=np.block([[matrix, -ones], [-matrix, -ones]]),
        b_ub=np.concatenate([values, -values]),
        bounds=[(None, None)] * len(columns) + [(0, None)],
    )
    return solved.fun


def points_of(gap):
    """The points of the difference, and those of a small grid."""
    m = len(gap.one)
    found = []
    for taken in itertools.product((False, True), repeat=len(gap.blocks)):
        point = gap.one.copy()
        for block, there in zip(gap.blocks, taken):
            point[list(block)] = (gap.other if there else gap.one)[list(block)]
        found.append(point)
    return np.unique(np.concatenate([found, np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=m)))]), axis=0)


FUNCTIONS = ["x0*x1*x2", "exp(x0 + x1*x2)", "sin(2*x0*x1) + x2^3", "1/(4 + x0 + x1 + x2)", "max(x0, x1, x2)"]


@pytest.mark.parametrize("reads", [0, 1, 2])
@pytest.mark.parametrize("text", FUNCTIONS)
def test_no_sum_of_functions_of_few_coordinates_is_nearer(text, reads):
    gap = additive_gap(text, cube(3), reads=reads)
    points = points_of(gap)
    best = nearest_sum(make_target(text, cube(3))(points)[:, 0], points, reads)
    assert gap.lower_bound <= best + 1e-9
    assert gap.lower_bound >= 0.9 * best or reads == 1  # two points, or every corner: the programs find little more


def test_functions_that_read_more_do_come_nearer():
    """Control: the bound for k coordinates is false for k + 1."""
    gap = additive_gap("sin(2*x0*x1) + x2^3", cube(3), reads=1)
    points = points_of(gap)
    values = make_target("sin(2*x0*x1) + x2^3", cube(3))(points)[:, 0]
    assert nearest_sum(values, points, 2) < 1e-6 < 0.8 < gap.lower_bound


@pytest.mark.parametrize("factors", [["x0", "x1", "x2"], ["exp(x0)", "(1 + x1^2)", "sin(x2 + 1)"]])
def test_the_bound_is_attained_by_products(factors):
    """With mid-ranges m_i, `Π φ_i − Π (φ_i − m_i)` is a sum of functions that miss a coordinate, at distance Π osc(φ_i)/2."""
    fine = np.linspace(-1, 1, 2001)
    ranges = [make_target(p.replace(f"x{i}", "x0"), cube(1))(fine[:, None])[:, 0] for i, p in enumerate(factors)]
    distance = math.prod((r.max() - r.min()) / 2 for r in ranges)
    gap = additive_gap("*".join(factors), cube(3), reads=2)
    assert gap.lower_bound == pytest.approx(distance, rel=1e-4) and gap.lower_bound <= distance * (1 + 1e-9)


@pytest.mark.parametrize("count", [2, 5, 10])
def test_no_number_of_heads_improves_on_zero_for_the_product(count):
    text = "*".join(f"x{i}" for i in range(count))
    gap = additive_gap(text, cube(count), reads=count - 1)
    assert 1 - 1e-12 < gap.lower_bound <= 1
    assert sorted(i for block in gap.blocks for i in block) == list(range(count))


def test_blocks_of_coordinates_make_the_bound_larger():
    """exp(−|x|²) in ten dimensions, pairs: one coordinate per block would give ((1 − 1/e)/2)³ = 0.0316."""
    gap = additive_gap(bell_of(10), cube(10), reads=2)
    assert gap.lower_bound == pytest.approx(math.prod((1 - math.exp(-k)) / 2 for k in (3, 3, 4)), rel=1e-6)


def test_a_sum_of_functions_of_one_coordinate_has_no_gap():
    assert additive_gap(sines_of(6), cube(6), reads=1).lower_bound == 0
    assert additive_gap(sines_of(6), cube(6), reads=0).lower_bound > 5.9  # constants are 6 away
    ishigami = KNOWN_FUNCTIONS["Ishigami"]
    gaps = [additive_gap(ishigami.expression, ishigami.box, reads=k).lower_bound for k in range(3)]
    assert gaps[0] > gaps[1] > 1 and gaps[2] == 0  # x2⁴ sin(x0) reads two


def test_the_largest_of_several_outputs_counts():
    gap = additive_gap("x0 + x1, 3*x0*x1", cube(2), reads=1)
    assert gap.output == 1 and gap.lower_bound == pytest.approx(3)


def test_what_cannot_be_bounded_is_refused():
    with pytest.raises(UnsupportedError, match="reads is 2; expected"):
        additive_gap("x0*x1", cube(2), reads=2)
    with pytest.raises(UnsupportedError, match="reads is -1"):
        additive_gap("x0*x1", cube(2), reads=-1)
    with pytest.raises(NothingKnownError):
        additive_gap(lambda z: np.sort(z, axis=1)[:, 0], cube(2), reads=1)
    with pytest.raises(DomainError):
        least_numbers(3, 0.0)
    with pytest.raises(DomainError):
        product_gap(0, 3)


# numbers for unstructured functions


def bumps(signs, cells, x):
    """`Σ ± (s/2 − |x − c|_∞)₊` on the cells of side s = 1/cells."""
    index = np.minimum((x * cells).astype(int), cells - 1)
    height = 0.5 / cells - np.abs(x - (index + 0.5) / cells).max(axis=1)
    return signs[tuple(index.T)] * height.clip(0)


@pytest.mark.parametrize("dimension, tolerance", [(1, 0.1), (2, 0.15), (3, 0.2)])
def test_the_functions_that_are_counted_are_lipschitz_and_far_apart(dimension, tolerance):
    cells = round(least_numbers(dimension, tolerance, bits=1) ** (1 / dimension))
    assert 1 / cells > 2 * tolerance >= 1 / (cells + 1)
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 4000, dimension))
    y = np.clip(np.where(rng.random((4000, 1)) < 0.5, x + 0.05 * (y - 0.5), y), 0, 1)
    centers = (np.array(list(itertools.product(range(cells), repeat=dimension))) + 0.5) / cells
    signs = [rng.choice([-1.0, 1.0], (cells,) * dimension) for _ in range(3)]
    signs.append(signs[0].copy())
    signs[-1].flat[-1] *= -1  # one bump differs
    for sign in signs:
        moved = np.abs(bumps(sign, cells, x) - bumps(sign, cells, y))
        assert (moved <= np.abs(x - y).max(axis=1) * (1 + 1e-9)).all()
    for a, b in itertools.combinations(signs, 2):
        assert np.abs(bumps(a, cells, centers) - bumps(b, cells, centers)).max() > 2 * tolerance


def test_sixteen_functions_need_four_bits():
    """All of them, in one dimension: no value at the centers is within ε of two."""
    assert least_numbers(1, 0.12, bits=1) == 4
    tables = np.array(list(itertools.product((-1, 1), repeat=4))) / 8
    distances = np.abs(tables[:, None] - tables[None]).max(axis=2)
    assert (distances[~np.eye(16, dtype=bool)] > 0.24).all()
    assert least_numbers(1, 0.126, bits=1) == 3  # control: four bumps would be within 2ε


# heads that read directions


def tensors(directions, degree):
    """a ⊗ … ⊗ a, flat."""
    power = directions
    for _ in range(degree - 1):
        power = (power[:, :, None] * directions[:, None]).flatten(1)
    return power


def product_tensor(d):
    out = torch.zeros((d,) * d, dtype=torch.float64)
    for order in itertools.permutations(range(d)):
        out[order] = 1 / math.factorial(d)
    return out.flatten()


def nearest_powers(d, count, seed):
    """The least relative distance of the product from `count` d-th powers that a search of their directions finds."""
    torch.manual_seed(seed)
    goal = product_tensor(d)
    terms = torch.randn(count, d, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([terms], max_iter=300, line_search_fn="strong_wolfe")

    def residual():
        basis = tensors(terms / terms.norm(dim=1, keepdim=True), d).T
        weights = torch.linalg.solve(basis.T @ basis + 1e-9 * torch.eye(count), basis.T @ goal)
        return ((goal - basis @ weights) ** 2).sum() / (goal**2).sum()

    def closure():
        optimizer.zero_grad()
        loss = residual()
        loss.backward()
        return loss

    optimizer.step(closure)
    return math.sqrt(residual().item())


@pytest.mark.parametrize("d, heads", [(2, 1), (3, 1), (3, 2), (4, 3), (4, 5)])
def test_no_sum_of_few_powers_is_nearer_than_the_bound(d, heads):
    found = min(nearest_powers(d, heads, seed) for seed in range(3))
    bound = product_gap(d, heads)
    assert 0 < bound <= found * (1 + 1e-9)
    if d == 2:
        assert found == pytest.approx(bound, rel=1e-3)  # attained: one square of a matrix of rank two


def test_the_bound_holds_for_functions_that_are_no_polynomials():
    """d = 3, two directions, any g in the span of 24 functions of each, by quadrature for the normal distribution."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    x = np.array(list(itertools.product(nodes, repeat=3)))
    w = np.prod(np.array(list(itertools.product(weights, repeat=3))) / math.sqrt(2 * math.pi), axis=1)
    rng = np.random.default_rng(0)
    for _ in range(4):
        columns = []
        for a in rng.standard_normal((2, 3)):
            u = x @ (a / np.linalg.norm(a))
            columns += [np.tanh(k * (u - c)) for k in (1, 3) for c in np.linspace(-2, 2, 9)] + [u**k for k in range(6)]
        root = np.sqrt(w)
        matrix, goal = np.stack(columns, axis=1) * root[:, None], x.prod(axis=1) * root
        left = goal - matrix @ np.linalg.lstsq(matrix, goal, rcond=1e-10)[0]
        assert (goal**2).sum() == pytest.approx(1)
        assert math.sqrt((left**2).sum()) >= product_gap(3, 2)


@pytest.mark.parametrize("d", [2, 3, 6])
def test_enough_powers_are_the_product(d):
    """2^{d−1} heads: `Π x_i = Σ_ε (Π ε)(x_0 + ε_1 x_1 + …)^d / (2^{d−1} d!)`."""
    x = np.random.default_rng(0).uniform(-1, 1, (50, d))
    signs = np.array([(1, *rest) for rest in itertools.product((-1, 1), repeat=d - 1)])
    total = (signs.prod(axis=1) * (x @ signs.T) ** d).sum(axis=1) / (2 ** (d - 1) * math.factorial(d))
    assert np.allclose(total, x.prod(axis=1), atol=1e-12)
    assert product_gap(d, len(signs)) == 0 and product_gap(d, math.comb(d, d // 2) - 1) > 0


def test_heads_that_read_more_directions_are_fewer():
    gaps = [product_gap(12, 12, reads=k) for k in (1, 2, 3, 12)]
    assert gaps == sorted(gaps, reverse=True) and gaps[2] > 0 and gaps[3] == 0
    assert product_gap(12, 0) == pytest.approx(1)
