"""Estimators that are one head: scikit-learn's own checks, leave-one-out against refitting, heads, cells, odd data."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.metrics import r2_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from partita.errors import MissingExtraError, ShapeError, UnsupportedError
from partita.geometry import PowerDiagram
from partita.learn import PartitionClassifier, PartitionRegressor, model, ridge, search, smoothing
from partita.learn.ridge import try_ridge
from partita.learn.search import Request, best_fit, relevance
from partita.learn.smoothing import Keys, Smoother

OTHERS = {"centers": 5, "values": "affine", "scaling": "none", "random_state": 0}


@parametrize_with_checks([e(**kw) for e in (PartitionRegressor, PartitionClassifier) for kw in ({}, OTHERS)])
def test_scikit_learn_accepts_them(estimator, check):
    check(estimator)


def cloud(n=40, m=3, *, seed=0, outputs=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, m))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, -1] ** 2 + 0.1 * rng.normal(size=n)
    return x, np.column_stack([y * (k + 1) + k * x[:, 0] for k in range(outputs)]) if outputs else y


# ---- leave-one-out -------------------------------------------------------------------------------


def refitted(x, y, centers, *, rate, penalty, affine, at):
    """Oracle: features by loops, one stacked least-squares problem with a free constant or affine part, its value at a point."""

    def features(p):
        scores = np.array([-rate * sum((a - b) ** 2 for a, b in zip(p, c)) / 2 for c in centers])
        w = np.exp(scores - scores.max())
        w /= w.sum()
        moments = [np.sqrt(rate) * w[j] * (p[k] - c[k]) for j, c in enumerate(centers) for k in range(len(p))]
        return np.array([*w, *(moments if affine else [])])

    free = (lambda p: [1.0, *p]) if affine else (lambda p: [1.0])
    rows = np.array([[*free(p), *features(p)] for p in x])
    shrink = np.zeros((rows.shape[1], rows.shape[1]))
    for k in range(len(free(x[0])), rows.shape[1]):
        shrink[k, k] = np.sqrt(penalty)
    solution = np.linalg.lstsq(np.vstack([rows, shrink]), np.concatenate([y, np.zeros(len(shrink))]), rcond=None)[0]
    return np.array([*free(at), *features(at)]) @ solution


def left_out_by_refitting(x, y, **kw):
    return np.array([refitted(np.delete(x, i, 0), np.delete(y, i), at=x[i], **kw) for i in range(len(x))])


CASES = {f"{kind}, {n} centers": (kind == "affine", n) for kind in ("constant", "affine") for n in (4, 25)}


@pytest.mark.parametrize("affine, count", CASES.values(), ids=CASES)
def test_closed_form_leave_one_out_is_refitting(affine, count, monkeypatch):
    x, y = cloud(25, 2)
    kw = {"centers": x[:count], "rate": 1.3, "penalty": 1e-2, "affine": affine}
    expected = left_out_by_refitting(x, y, **kw)
    keys = Keys(x[:count], 1.3, affine)
    fit = try_ridge(keys, x, y[:, None], penalty=1e-2).finish()
    assert np.abs(fit.left_out[:, 0] - expected).max() < 1e-8
    assert fit.error == pytest.approx(((expected - y) ** 2).mean(), rel=1e-8)
    at_data = [refitted(x, y, at=p, **kw) for p in x]
    assert np.abs(fit.smoother(x)[:, 0] - at_data).max() < 1e-8
    monkeypatch.setattr(ridge, "_LEAST_SLACK", 1.0)  # negative control: residuals that are not divided by 1 − H_ii
    undivided = try_ridge(keys, x, y[:, None], penalty=1e-2).finish()
    assert np.abs(undivided.left_out[:, 0] - expected).max() > 1e-2


@pytest.mark.parametrize("kw", [{"solver": "smoother"}, {"ridge": 0.05, "values": "affine"}, {"ridge": 0.05}])
def test_estimators_report_what_refitting_them_would_say(kw):
    x, y = cloud(30, 2)
    keys = {} if "solver" in kw else {"centers": x[:7]}
    model = PartitionRegressor(inverse_temperature=2.0, scaling="none", **keys, **kw).fit(x, y)
    said = model.loo_predictions_.copy()
    score, error = model.loo_score_, model.loo_error_
    again = [model.fit(np.delete(x, i, 0), np.delete(y, i)).predict(x[[i]])[0] for i in range(len(x))]
    assert np.abs(said - again).max() < 1e-8
    assert score == pytest.approx(r2_score(y, again)) and error == pytest.approx(((y - again) ** 2).mean())
    seen = PartitionRegressor(inverse_temperature=2.0, scaling="none", **keys, **kw).fit(x, y).predict(x)
    assert np.abs(said - seen).max() > 1e-2  # negative control: a fit that has seen the point says something else


def test_the_smoother_leaves_its_own_key_out_even_where_it_holds_all_the_weight():
    x, y = np.array([[0.0], [10.0], [10.1]]), np.array([1.0, 2.0, 4.0])
    model = PartitionRegressor(solver="smoother", inverse_temperature=50.0, scaling="none").fit(x, y)
    assert model.loo_predictions_ == pytest.approx([2.0, 4.0, 2.0])  # 1 − w_ii is 0 in floating point at the first
    assert model.degrees_of_freedom_ == pytest.approx(1 + 2 / (1 + np.exp(-0.25)))


@pytest.mark.parametrize("values", ["constant", "affine"])
def test_degrees_of_freedom_are_the_trace_of_the_hat_matrix(values):
    x, _ = cloud(12, 2)
    model = PartitionRegressor(x[:5], values, inverse_temperature=1.0, ridge=0.1, scaling="none")
    columns = [model.fit(x, unit).predict(x)[i] for i, unit in enumerate(np.eye(len(x)))]
    assert model.degrees_of_freedom_ == pytest.approx(sum(columns), rel=1e-9)


def test_the_penalty_of_least_leave_one_out_error_is_taken():
    x, y = cloud(30, 2)
    keys = Keys(x, 1.0)
    free = try_ridge(keys, x, y[:, None])
    fixed = [try_ridge(keys, x, y[:, None], penalty=free.finish().penalty * f).error for f in (0.1, 1.0, 10.0)]
    assert free.error == pytest.approx(fixed[1]) and fixed[1] < min(fixed[0], fixed[2])


@pytest.mark.parametrize("seed", range(4))
def test_a_fine_grid_of_rates_finds_little_better(seed):
    x, y = cloud(40, 2, seed=seed)
    best = best_fit(x, x, y[:, None], request=Request())
    grid = [try_ridge(Keys(x, rate), x, y[:, None]).error for rate in np.geomspace(0.1, 100, 60)]
    assert best.error <= 1.1 * min(grid) < 0.8 * max(grid)
    beside = [try_ridge(Keys(x, best.smoother.keys.rate * f), x, y[:, None]).error for f in (0.84, 1.19)]
    assert best.error < 1.001 * min(beside)


def test_a_search_may_judge_some_points_only(monkeypatch):
    x, y = cloud(90, 2)
    weights = np.linspace(0.5, 2, 90)
    problem = ridge.Ridge.of(Keys(x[:12], 1.0), x, y[:, None], weights=weights)
    whole = problem.at(0.03)
    assert problem.error(0.03) == whole.error
    monkeypatch.setattr(ridge, "_JUDGED", 30)
    some = slice(None, None, 3)
    squares = (whole.finish().left_out[some, 0] - y[some]) ** 2
    assert problem.error(0.03) == pytest.approx(np.average(squares, weights=weights[some]))
    assert problem.error(0.03) != pytest.approx(whole.error)  # negative control: they are others


def test_values_get_slopes_where_that_leaves_less_error():
    winners = set()
    for seed in range(4):
        x, y = cloud(40, 2, seed=seed)
        kinds = [PartitionRegressor(values=v).fit(x, y) for v in ("constant", "affine", "auto")]
        assert kinds[2].loo_error_ <= 1.01 * min(kinds[0].loo_error_, kinds[1].loo_error_)
        winners.add(kinds[2].value_slopes_ is not None)
    assert winners == {False, True}


def test_rates_are_compared_on_some_points_and_fitted_to_all(monkeypatch):
    monkeypatch.setattr(search, "_ROWS_SEARCHED", 50)
    x, y = cloud(160, 1)
    for kw in ({"centers": 12, "random_state": 0}, {"solver": "smoother"}):
        model = PartitionRegressor(**kw).fit(x[:120], y[:120])
        assert model.loo_predictions_.shape == (120,) and model.score(x[120:], y[120:]) > 0.9


def test_blocks_of_rows_change_nothing(monkeypatch):
    x, y = cloud(50, 2, outputs=2)
    kw = {"centers": x[:6], "values": "affine", "ridge": 1e-3, "inverse_temperature": 2.0}
    whole = PartitionRegressor(**kw).fit(x, y)
    smooth = PartitionRegressor(solver="smoother").fit(x, y)
    monkeypatch.setattr(smoothing, "AT_ONCE", 400)
    parts = PartitionRegressor(**kw).fit(x, y)
    assert np.allclose(whole.predict(x), parts.predict(x), rtol=0, atol=1e-10)
    assert np.allclose(whole.loo_predictions_, parts.loo_predictions_, rtol=0, atol=1e-10)
    assert whole.effective_keys_ == pytest.approx(parts.effective_keys_)
    again = PartitionRegressor(solver="smoother").fit(x, y)
    assert np.allclose(smooth.loo_predictions_, again.loo_predictions_, rtol=0, atol=1e-12)
    assert smooth.degrees_of_freedom_ == pytest.approx(again.degrees_of_freedom_)


def test_gradient_sizes_are_those_of_differences():
    x, y = cloud(30, 3, outputs=2)
    net = Smoother(Keys(x[:8], 0.7), y[:8])
    step = 1e-5 * np.eye(3)
    slopes = np.stack([(net(x + e) - net(x - e)) / 2e-5 for e in step], axis=2)
    assert net.gradient_size(x) == pytest.approx(np.sqrt((slopes**2).mean(axis=(0, 1))), rel=1e-6)


# ---- heads and cells -----------------------------------------------------------------------------

MODELS = {
    "default": PartitionRegressor(),
    "raw features": PartitionRegressor(scaling="none"),
    "affine": PartitionRegressor(9, "affine", random_state=0),
    "smoother": PartitionRegressor(solver="smoother", scaling="standard"),
    "classes": PartitionClassifier(values="affine"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_head_takes_raw_features_and_predicts_the_same(name):
    x, y = cloud(60, 3, outputs=2)
    x = x * [1.0, 30.0, 0.02] + [0.0, 100.0, 5.0]
    y = y if isinstance(MODELS[name], PartitionRegressor) else y[:, 0] > 0
    model = MODELS[name].fit(x, y)
    new = x[:20] + 0.3 * x.std(axis=0)
    out = model.head_(new).numpy()
    if isinstance(model, PartitionClassifier):
        assert (model.classes_[out.argmax(axis=1)] == model.predict(new)).all()
        logits = model.proba_sharpness_ * out
        out, expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), model.predict_proba(new)
    else:
        expected = model.predict(new)
    assert np.abs(out - expected).max() < 1e-9 * max(1.0, np.abs(expected).max())
    if model.scale_.std() > 0:  # negative control: the powers are what folds the scales in
        before = model.head_(new)
        model.head_.powers.zero_()
        assert (model.head_(new) - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_cells_are_those_of_the_nearest_center_in_scaled_features(name):
    x, y = cloud(60, 3)
    x = x * [1.0, 30.0, 0.02]
    model = MODELS[name].fit(x, y if isinstance(MODELS[name], PartitionRegressor) else y > 0)
    new = cloud(200, 3, seed=1)[0] * [1.0, 30.0, 0.02]
    scaled, centers = ((a - model.mean_) * model.scale_ for a in (new, model.centers_))
    nearest = [int(np.argmin([((p - c) ** 2).sum() for c in centers])) for p in scaled]
    assert model.partition_.cell(new).tolist() == nearest
    if model.scale_.std() > 0:  # negative control: in raw space the plain Voronoi cells are others
        assert PowerDiagram(model.centers_).cell(new).tolist() != nearest


def test_what_is_reported_reads_as_a_head():
    x, y = cloud(50, 2)
    model = PartitionRegressor(scaling="standard", values="constant").fit(x, y)
    scaled = (x - x.mean(axis=0)) / x.std(axis=0)
    squared = np.array([[((p - c) ** 2).sum() for c in scaled] for p in scaled])
    w = np.exp(-model.inverse_temperature_ * squared / 2)
    w /= w.sum(axis=1, keepdims=True)
    assert np.allclose(w @ model.values_[:, 0], model.predict(x), atol=1e-9)
    assert model.effective_keys_ == pytest.approx((1 / (w**2).sum(axis=1)).mean())
    nearest = np.sort(squared, axis=1)[:, 1]
    assert model.sharpness_ == pytest.approx(model.inverse_temperature_ * nearest.mean())
    assert np.allclose(model.centers_, x) and model.value_slopes_ is None


# ---- what is learned -----------------------------------------------------------------------------


@pytest.mark.parametrize("centers", ["auto", 4])
def test_affine_values_fit_affine_data_exactly_and_constant_ones_do_not(centers):
    x, _ = cloud(40, 3)
    far = 3 * x
    exact = PartitionRegressor(centers, "affine", random_state=0).fit(x, x @ [1.0, -2.0, 0.5] + 4)
    assert np.abs(exact.predict(far) - far @ [1.0, -2.0, 0.5] - 4).max() < 1e-9
    rough = PartitionRegressor(centers, "constant", random_state=0).fit(x, x @ [1.0, -2.0, 0.5] + 4)
    assert np.abs(rough.predict(far) - far @ [1.0, -2.0, 0.5] - 4).max() > 1e-2


def test_features_that_do_not_matter_are_shrunk_and_noise_shrinks_none():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(250, 6))
    y = np.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * rng.normal(size=250)
    plain = PartitionRegressor(scaling="standard").fit(x[:200], y[:200])
    scaled = PartitionRegressor().fit(x[:200], y[:200])
    sizes = scaled.scale_ * x[:200].std(axis=0)
    assert sizes[:2].min() > 3 * sizes[2:].max()
    assert scaled.score(x[200:], y[200:]) > plain.score(x[200:], y[200:]) + 0.1
    assert np.array_equal(relevance(x, rng.normal(size=(250, 1)))[0], np.ones(6))


def test_outputs_are_fitted_together_as_they_would_be_alone():
    x, y = cloud(40, 2, outputs=3)
    kw = {"inverse_temperature": 1.5, "ridge": 0.01, "scaling": "standard", "values": "affine"}
    together = PartitionRegressor(**kw).fit(x, y).predict(x)
    alone = [PartitionRegressor(**kw).fit(x, y[:, k]).predict(x) for k in range(3)]
    assert together.shape == (40, 3) and np.allclose(together, np.column_stack(alone), atol=1e-9)


def test_probabilities_are_probabilities_and_labels_may_be_anything():
    x, y = cloud(240, 2)
    labels = np.array(["low", "middle", "high"], dtype=object)[np.digitize(y, [-0.3, 0.6])]
    model = PartitionClassifier().fit(x[:180], labels[:180])
    chance = model.predict_proba(x[180:] * 3)
    assert model.classes_.tolist() == ["high", "low", "middle"] and chance.shape == (60, 3)
    assert (chance >= 0).all() and (chance <= 1).all() and np.allclose(chance.sum(axis=1), 1, atol=1e-12)
    assert (model.classes_[chance.argmax(axis=1)] == model.predict(x[180:] * 3)).all()
    assert model.score(x[180:], labels[180:]) > 0.7 and 0 < model.loo_score_ <= 1
    numbers = PartitionClassifier().fit(x[:180], y[:180] > 0)
    assert numbers.classes_.dtype == bool and numbers.score(x[180:], y[180:] > 0) > 0.8


def test_separable_classes_leave_some_doubt():
    x = np.linspace(-1, 1, 20)[:, None]
    model = PartitionClassifier().fit(x, x[:, 0] > 0)
    assert model.score(x, x[:, 0] > 0) == 1.0 and model.proba_sharpness_ < 100
    assert 0 < model.predict_proba([[1.0]])[0, 0] < 0.05 < model.predict_proba([[0.0]])[0, 0]


# ---- odd data ------------------------------------------------------------------------------------


def test_a_constant_target_comes_back():
    x, _ = cloud(20, 2)
    for values in ("constant", "affine"):
        model = PartitionRegressor(values=values).fit(x, np.full(20, 7.5))
        assert np.allclose(model.predict(3 * x), 7.5, atol=1e-12) and model.loo_error_ < 1e-20
    assert (PartitionClassifier().fit(x, ["same"] * 20).predict(x) == "same").all()


def test_one_sample_two_samples_one_place():
    one = PartitionRegressor().fit([[1.0, 2.0]], [3.0])
    assert one.predict([[5.0, 6.0]]).tolist() == [3.0] and np.isnan(one.loo_score_)
    two = PartitionRegressor().fit([[0.0], [1.0]], [0.0, 1.0])
    assert np.isfinite(two.predict([[0.5]])).all() and two.loo_predictions_.tolist() == pytest.approx([1.0, 0.0])
    same = PartitionRegressor().fit(np.ones((6, 2)), np.arange(6.0))
    assert same.predict([[1.0, 1.0]]) == pytest.approx([2.5])


@pytest.mark.parametrize("kw", [{}, {"values": "affine"}, {"solver": "smoother"}, {"centers": 7, "random_state": 0}])
def test_duplicates_one_feature_and_more_features_than_points(kw):
    x, y = cloud(20, 1)
    twice = PartitionRegressor(**kw).fit(np.vstack([x, x, x]), np.concatenate([y, y, y]))
    assert np.abs(twice.predict(x) - y).mean() < 0.3 and np.isfinite(twice.loo_score_)
    few = PartitionRegressor(**kw).fit(*cloud(8, 30))
    assert np.isfinite(few.predict(cloud(5, 30, seed=1)[0])).all() and np.isfinite(few.loo_error_)


def test_centers_are_those_asked_for():
    x, y = cloud(30, 2)
    assert len(PartitionRegressor(7, random_state=0).fit(x, y).centers_) == 7
    given = PartitionRegressor(x + 0.1).fit(x, y)  # as many as points, but not the points
    assert np.allclose(given.centers_, x + 0.1) and np.allclose(given.head_(x).numpy(), given.predict(x), atol=1e-9)


def test_more_keys_asked_for_than_places_there_are():
    x = np.repeat(np.arange(4.0), 5)[:, None]
    model = PartitionRegressor(10).fit(x, x[:, 0] ** 2)
    assert len(model.centers_) == 4 and np.allclose(model.predict(x), x[:, 0] ** 2, atol=1e-3)
    different = np.arange(20.0)[:, None]
    with pytest.warns(UserWarning, match="centers=99, but X has only 20 rows"):
        assert len(PartitionRegressor(99).fit(different, different[:, 0]).centers_) == 20


def test_units_of_the_features_do_not_matter():
    x, y = cloud(60, 3)
    units = np.array([1e-7, 1.0, 1e7])
    plain, scaled = PartitionRegressor().fit(x, y), PartitionRegressor().fit(x * units, y)
    assert np.allclose(plain.predict(x), scaled.predict(x * units), atol=1e-6)
    raw = PartitionRegressor(scaling="none").fit(x * units, y)  # negative control: without scaling they do
    assert np.abs(plain.predict(x) - raw.predict(x * units)).max() > 0.1


def test_many_points_get_few_keys_and_the_seed_decides(monkeypatch):
    monkeypatch.setattr(model, "_FEATURES", 40)
    monkeypatch.setattr(model, "_ALL_WEIGHED", 50)
    monkeypatch.setattr(model, "_KEYS_WEIGHED", 30)
    x, y = cloud(400, 2)
    first, again, other = (PartitionRegressor(random_state=s).fit(x[:300], y[:300]) for s in (0, 0, 1))
    assert len(first.centers_) <= 40 and first.score(x[300:], y[300:]) > 0.9
    assert np.array_equal(first.predict(x), again.predict(x)) and not np.array_equal(first.centers_, other.centers_)


@pytest.mark.parametrize(
    "kw, error",
    [
        ({"centers": "some"}, UnsupportedError),
        ({"centers": 0}, UnsupportedError),
        ({"centers": 2.5}, UnsupportedError),
        ({"centers": np.zeros((3, 5))}, ShapeError),
        ({"centers": np.full((3, 2), np.nan)}, ShapeError),
        ({"values": "cubic"}, UnsupportedError),
        ({"solver": "magic"}, UnsupportedError),
        ({"scaling": "log"}, UnsupportedError),
        ({"inverse_temperature": -1.0}, UnsupportedError),
        ({"ridge": 0.0}, UnsupportedError),
        ({"solver": "smoother", "centers": 4}, UnsupportedError),
        ({"solver": "smoother", "values": "affine"}, UnsupportedError),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(kw, error):
    with pytest.raises(error, match=r"expected|leave centers"):
        PartitionRegressor(**kw).fit(*cloud(20, 2))


def test_without_scikit_learn_partita_imports_and_learn_says_what_to_install():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import partita\n"
        "from partita.errors import MissingExtraError\n"
        "try:\n    import partita.learn\n"
        "except MissingExtraError as error:\n    print(error)\n"
        "try:\n    partita.learn\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = str(MissingExtraError.of("partita.learn needs", "sklearn"))
    assert answer.stdout.splitlines() == [expected, expected] and "pip install" in expected, answer.stderr
