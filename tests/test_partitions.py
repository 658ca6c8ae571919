"""Proposition 3.1 as a law, conversions, lookups, grids, covers, polygons."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import Voronoi

import partita as pa
from partita.errors import DomainError, ShapeError, SizeError, UnsupportedError
from partita.geometry import Partition, farthest_point_cover, polygons


def random_max_affine(seed: int, cells: int, m: int) -> pa.MaxAffine:
    rng = np.random.default_rng(seed)
    return pa.MaxAffine(rng.normal(size=(cells, m)), 0.3 * rng.normal(size=cells))


def is_partition(partition: Partition, labels: np.ndarray, points: np.ndarray) -> bool:
    """Proposition 3.1: each point lies in the cell it is given to, and in another one only where the scores tie."""
    scores = partition.scores(points)
    own = scores[np.arange(len(points)), labels]
    belongs = own >= scores.max(axis=1)
    others = np.where(np.arange(partition.num_cells) == labels[:, None], -np.inf, scores).max(axis=1, initial=-np.inf)
    strict = (partition.margin(points) > 1e-9) == (own - others > 1e-9)
    return bool(belongs.all() and strict.all())


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), cells=st.integers(1, 12), m=st.integers(1, 4))
def test_max_affine_cells_cover_and_meet_only_in_ties(seed, cells, m):
    partition = random_max_affine(seed, cells, m)
    points = np.random.default_rng(seed + 1).uniform(-2, 2, (200, m))
    assert is_partition(partition, partition.cell(points), points)


def test_the_partition_law_can_fail():
    partition = random_max_affine(0, 6, 2)
    points = np.random.default_rng(1).uniform(-2, 2, (200, 2))
    assert not is_partition(partition, (partition.cell(points) + 1) % 6, points)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), cells=st.integers(1, 12), m=st.integers(1, 4))
def test_conversions_and_common_affine_functions_move_no_cell(seed, cells, m):
    partition = random_max_affine(seed, cells, m)
    rng = np.random.default_rng(seed + 2)
    points = rng.uniform(-2, 2, (200, m))
    points = points[partition.margin(points) > 1e-9]
    there, back = partition.to_power_diagram(), partition.to_power_diagram().to_max_affine()
    shifted = pa.MaxAffine(partition.slopes + rng.normal(size=m), partition.offsets + rng.normal())
    for other in (there, back, shifted):
        assert np.array_equal(partition.cell(points), other.cell(points))
        assert np.allclose(partition.margin(points), other.margin(points), atol=1e-9)


def test_shifting_one_cell_only_does_move_it():
    partition = pa.MaxAffine([[0.0], [1.0]], [0.0, 0.0])
    other = pa.MaxAffine([[0.0], [1.0]], [0.0, -0.5])
    assert not np.array_equal(partition.cell([[0.2]]), other.cell([[0.2]]))


def test_indicator_margin_and_value():
    partition = pa.MaxAffine([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], [0.0, 0.0, 0.1])
    points = np.array([[1.0, 0.2], [0.0, 2.0], [0.5, 0.5]])
    assert partition.indicator(points).argmax(1).tolist() == [0, 1, 0]  # the tie goes to the smallest label
    assert np.allclose(partition.margin(points), [0.8, 2.0, 0.0])
    assert np.allclose(partition.value(points), [1.0, 2.0, 0.5])
    assert np.isinf(pa.MaxAffine([[1.0]], [0.0]).margin([[3.0]])).all()


def test_voronoi_cells_are_power_diagrams_with_equal_powers():
    centers = np.random.default_rng(0).uniform(size=(40, 3))
    points = np.random.default_rng(1).uniform(size=(500, 3))
    nearest = ((points[:, None] - centers) ** 2).sum(2).argmin(1)
    assert np.array_equal(pa.PowerDiagram(centers).cell(points), nearest)


@pytest.mark.parametrize("bad", [([[1.0, 2.0]], [1.0, 2.0]), ([1.0, 2.0], [1.0, 2.0]), ([[np.nan]], [0.0])])
def test_bad_partitions_are_refused(bad):
    with pytest.raises((ShapeError, DomainError)):
        pa.MaxAffine(*bad)
    with pytest.raises(ShapeError, match="R\\^1"):
        pa.MaxAffine([[1.0]], [0.0]).cell([[1.0, 2.0]])


# --- grids ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(1, 4), ghosts=st.integers(0, 2))
def test_grid_lookup_is_the_cell_of_the_whole_diagram(seed, m, ghosts):
    rng = np.random.default_rng(seed)
    lo = rng.uniform(-5, 5, m)
    box = pa.Box(lo, lo + rng.uniform(0.1, 3, m))
    grid = pa.ProductGrid.uniform(box, rng.integers(1, 5, m) + 2 * ghosts, ghosts=ghosts)
    points = box.sample(100, rng)
    points = points[grid.margin(points) > 1e-12]
    assert np.allclose(grid.margin(points), grid.to_power_diagram().margin(points), atol=1e-12)
    assert np.array_equal(grid.cell(points), grid.to_power_diagram().cell(points))
    assert np.allclose(grid.centers_of(np.arange(grid.num_cells)), grid.to_power_diagram().centers)


def test_grid_centers_are_centers_and_the_covering_radius_is_attained():
    grid = pa.ProductGrid.uniform(pa.Box([0, 0], [1, 2]), [4, 5])
    assert np.allclose(grid.axes[0], [0.125, 0.375, 0.625, 0.875])
    corner = np.array([[0.25, 0.4]])
    distance = np.sqrt(((corner[:, None] - grid.to_power_diagram().centers) ** 2).sum(2)).min()
    assert np.isclose(distance, grid.covering_radius)
    assert grid.covering_radius >= np.hypot(0.125, 0.2)


def test_ghosts_lie_outside_with_the_same_spacing():
    grid = pa.ProductGrid.uniform(pa.Box([0], [1]), [8], ghosts=2)
    assert np.allclose(np.diff(grid.axes[0]), 0.25)
    assert (grid.axes[0] < 0).sum() == 2 and (grid.axes[0] > 1).sum() == 2


def test_grids_refuse_what_they_cannot_be():
    box = pa.Box([0], [1])
    with pytest.raises(DomainError):
        pa.ProductGrid.uniform(box, [4], ghosts=2)
    with pytest.raises(SizeError, match="GiB"):
        pa.ProductGrid.uniform(pa.Box([0] * 3, [1] * 3), 1000).to_power_diagram()


# --- covers --------------------------------------------------------------------------------------------------------


def test_covers_cover_and_are_within_twice_the_best():
    points = np.random.default_rng(0).uniform(size=(2000, 2))
    for balls in (1, 5, 40):
        cover = farthest_point_cover(points, max_balls=balls)
        distance = np.sqrt(((points[:, None] - cover.centers) ** 2).sum(2)).min(1)
        assert len(cover.centers) == balls and distance.max() <= cover.radius <= distance.max() * (1 + 1e-12)
        # balls + 1 points that are pairwise at least `radius` apart force any cover by `balls` balls to radius/2
        far = points[distance.argmax()]
        packed = np.vstack([cover.centers, far])
        gaps = np.sqrt(((packed[:, None] - packed) ** 2).sum(2))[~np.eye(balls + 1, dtype=bool)]
        assert gaps.min() >= cover.radius * (1 - 1e-12)


def test_covers_stop_at_the_radius_asked_and_at_duplicates():
    points = np.repeat(np.random.default_rng(1).normal(size=(7, 3)), 4, axis=0)
    cover = farthest_point_cover(points)
    assert len(cover.centers) == 7 and cover.radius == 0
    assert farthest_point_cover(points, radius=0.5).radius <= 0.5


# --- polygons ------------------------------------------------------------------------------------------------------


def area(polygon: np.ndarray) -> float:
    x, y = polygon.T if len(polygon) else (np.zeros(1), np.zeros(1))
    return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def holds(polygon: np.ndarray, point: np.ndarray) -> bool:
    edge, toward = np.roll(polygon, -1, axis=0) - polygon, point - polygon
    return bool((edge[:, 0] * toward[:, 1] - edge[:, 1] * toward[:, 0] >= -1e-12).all())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cells", [1, 2, 7, 60, 300])
def test_polygons_tile_the_box_and_hold_their_points(cells, seed):
    partition, box = random_max_affine(seed, cells, 2), pa.Box([-2, -1], [2, 3])
    shapes = polygons(partition, box)
    assert np.isclose(sum(area(p) for p in shapes), box.volume, rtol=1e-9)
    assert all(area(p) >= 0 for p in shapes)  # counter-clockwise
    points = box.sample(300, np.random.default_rng(seed))
    for point, label in zip(points, partition.cell(points)):
        assert holds(shapes[label], point)


def test_polygons_of_a_grid_are_its_boxes():
    grid = pa.ProductGrid.uniform(pa.Box([0, 0], [3, 2]), [3, 2])
    shapes = polygons(grid, grid.box)
    assert np.allclose([area(p) for p in shapes], 1.0)
    assert np.allclose(shapes[0].min(axis=0), [0, 0]) and np.allclose(shapes[0].max(axis=0), [1, 1])


def test_polygons_agree_with_qhulls_voronoi_vertices():
    points = np.random.default_rng(3).uniform(size=(30, 2))
    shapes = polygons(pa.PowerDiagram(points), pa.Box([-9, -9], [10, 10]))
    corners = np.concatenate(shapes)
    vertices = Voronoi(points).vertices
    vertices = vertices[(np.abs(vertices) < 8).all(axis=1)]
    assert all(np.sqrt(((corners - v) ** 2).sum(axis=1)).min() < 1e-7 for v in vertices)


def test_far_from_zero_polygons_still_tile():
    points = 1e7 + np.random.default_rng(4).uniform(size=(50, 2))
    box = pa.Box([1e7, 1e7], [1e7 + 1, 1e7 + 1])
    assert np.isclose(sum(area(p - 1e7) for p in polygons(pa.PowerDiagram(points), box) if len(p)), 1.0, rtol=1e-2)


def test_polygons_refuse_other_dimensions():
    with pytest.raises(UnsupportedError, match="R\\^3"):
        polygons(random_max_affine(0, 4, 3), pa.Box([0] * 3, [1] * 3))


# --- domains -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lo", "hi", "words"),
    [
        ([0, 1], [1, 1], "axis 1"),
        ([2], [1], "axis 0"),
        ([0], [np.inf], "finite"),
        ([np.nan], [1], "finite"),
        ([0, 0], [1], "shape"),
        ([], [], "shape"),
        ([-1e308], [1e308], "rescale"),
        ([1.0], [1.0 + 2e-16], "rescale"),
    ],
)
def test_bad_boxes_say_what_is_wrong(lo, hi, words):
    with pytest.raises(DomainError, match=words):
        pa.Box(lo, hi)


@pytest.mark.parametrize(
    ("points", "fill", "words"),
    [
        (np.zeros((0, 2)), 0, "N ≥ 1"),
        (np.zeros(3), 0, "shape"),
        ([[np.nan]], 0, "number 0"),
        ([[0.0]], -1, "fill_distance"),
        ([[0.0]], np.inf, "fill_distance"),
    ],
)
def test_bad_clouds_say_what_is_wrong(points, fill, words):
    with pytest.raises(DomainError, match=words):
        pa.PointCloud(points, fill_distance=fill)


def test_domains_are_frozen():
    box = pa.Box([0, 0], [1, 1])
    with pytest.raises(ValueError, match="read-only"):
        box.lo[0] = 5
    with pytest.raises(AttributeError):
        box.lo = np.zeros(2)


@pytest.mark.parametrize(
    "domain", [pa.Box([-1, 2], [1, 5]), pa.PointCloud(np.random.default_rng(0).normal(size=(30, 2)), fill_distance=0.1)]
)
def test_samples_and_clamped_points_are_inside(domain):
    rng = np.random.default_rng(0)
    assert domain.contains(domain.sample(500, rng)).all()
    far = rng.normal(size=(200, 2)) * 10
    assert domain.contains(domain.clamp(far)).all()
    inside = domain.sample(50, rng)
    assert np.allclose(domain.clamp(inside), inside)
