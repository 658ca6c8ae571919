"""A data scientist's day: weights, classes, uncertainty, saving and exporting, all through `pa.learn`."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris
from sklearn.metrics import recall_score, roc_auc_score

import partita as pa
from partita.errors import AlreadyExistsError, FormatError, TamperedFileError, TruncatedFileError, UnsupportedError
from partita.learn import search, spread
from partita.learn.smoothing import Keys, Smoother


def wave(n=60, m=2, *, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, m))
    return x, np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=n)


def test_learn_is_reached_from_partita_and_loaded_only_then():
    seen = "print('sklearn' in sys.modules)"
    code = f"import sys, partita as pa\n{seen}\npa.learn.PartitionRegressor\n{seen}"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["False", "True"]


# ---- weights -------------------------------------------------------------------------------------

KINDS = {
    "default": {},
    "affine": {"values": "affine"},
    "few keys": {"centers": 6, "random_state": 0},
    "smoother": {"solver": "smoother"},
    "fixed": {"ridge": 0.1, "inverse_temperature": 1.0, "scaling": "none"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_copies_and_zero_is_absence(kind):
    x, y = wave(30)
    weights = np.random.default_rng(1).integers(0, 4, size=30)
    weighted = pa.learn.PartitionRegressor(**KINDS[kind]).fit(x, y, sample_weight=weights)
    copied = pa.learn.PartitionRegressor(**KINDS[kind]).fit(x.repeat(weights, axis=0), y.repeat(weights))
    new = wave(20, seed=2)[0]
    for one, other in zip(weighted.predict(new, return_std=True), copied.predict(new, return_std=True)):
        assert np.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert weighted.loo_error_ == pytest.approx(copied.loo_error_) and weighted.loo_score_ == pytest.approx(
        copied.loo_score_
    )
    assert weighted.degrees_of_freedom_ == pytest.approx(copied.degrees_of_freedom_)
    assert np.allclose(weighted.head_(new).numpy(), weighted.predict(new), atol=1e-9)  # weights reach the head, too
    plain = pa.learn.PartitionRegressor(**KINDS[kind]).fit(x, y)
    assert np.abs(plain.predict(new) - weighted.predict(new)).max() > 1e-3  # negative control
    doubled = pa.learn.PartitionRegressor(**KINDS[kind]).fit(x, y, sample_weight=np.full(30, 2.0))
    if kind != "fixed":  # a fixed λ weighs less against twice the data
        assert np.allclose(doubled.predict(new), plain.predict(new), rtol=1e-9, atol=1e-12)


def test_closed_form_leave_one_out_with_weights_is_refitting():
    x, y = wave(25)
    weights = np.random.default_rng(0).uniform(0.2, 3.0, size=25)
    kw = {"inverse_temperature": 1.5, "ridge": 0.05, "scaling": "none", "centers": x[:8], "values": "affine"}
    said = pa.learn.PartitionRegressor(**kw).fit(x, y, sample_weight=weights).loo_predictions_
    for i in range(0, 25, 4):
        others = np.arange(25) != i
        again = pa.learn.PartitionRegressor(**kw).fit(x[others], y[others], sample_weight=weights[others])
        assert again.predict(x[[i]])[0] == pytest.approx(said[i], abs=1e-8)
    unweighted = pa.learn.PartitionRegressor(**kw).fit(x, y).loo_predictions_
    assert np.abs(unweighted - said).max() > 1e-3  # negative control


def test_rows_of_weight_zero_get_the_prediction_of_a_fit_that_never_saw_them():
    x, y = wave(40)
    weights = np.where(np.arange(40) % 4 == 0, 0.0, 1.0)
    model = pa.learn.PartitionRegressor().fit(x, y, sample_weight=weights)
    assert np.allclose(model.loo_predictions_[::4], model.predict(x[::4])) and model.loo_predictions_.shape == (40,)
    assert np.abs(model.loo_predictions_[1] - model.predict(x[[1]])[0]) > 1e-6  # negative control: rows that it saw


@pytest.mark.parametrize(
    "bad", [[1.0], -np.ones(30), np.full(30, np.nan), np.zeros(30)], ids=["few", "negative", "nan", "zero"]
)
def test_weights_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match=r"sample_weight .* expected"):
        pa.learn.PartitionRegressor().fit(*wave(30), sample_weight=bad)


def rare(n=300, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.random(n) < 0.1
    return rng.normal(size=(n, 2)) + 1.3 * y[:, None], np.where(y, "rare", "usual")


def test_class_weights_find_more_of_the_rare_class():
    x, y = rare()
    new, labels = rare(seed=1)
    recall = {}
    for weight in (None, "balanced", {"rare": 9.0}):
        model = pa.learn.PartitionClassifier(class_weight=weight).fit(x, y)
        recall[str(weight)] = recall_score(labels, model.predict(new), pos_label="rare")
    assert recall["balanced"] > recall["None"] + 0.2 and recall["{'rare': 9.0}"] > recall["None"] + 0.2
    factors = np.where(y == "rare", len(y) / (2 * (y == "rare").sum()), len(y) / (2 * (y == "usual").sum()))
    by_hand = pa.learn.PartitionClassifier().fit(x, y, sample_weight=factors)
    balanced = pa.learn.PartitionClassifier(class_weight="balanced").fit(x, y)
    assert np.allclose(by_hand.predict_proba(new), balanced.predict_proba(new), atol=1e-9)
    for wrong in ("even", {"common": 2.0}, {"rare": -1.0}):
        with pytest.raises(UnsupportedError, match=r"class_weight .* expected"):
            pa.learn.PartitionClassifier(class_weight=wrong).fit(x, y)


def test_decision_functions_have_the_usual_shapes_and_signs():
    x, y = load_breast_cancer(return_X_y=True)
    names = np.array(["bad", "good"])[y]
    two = pa.learn.PartitionClassifier(scaling="standard", values="constant").fit(x[:200], names[:200])
    margin = two.decision_function(x[200:])
    assert margin.shape == (369,) and (np.where(margin > 0, "good", "bad") == two.predict(x[200:])).all()
    assert roc_auc_score(y[200:], margin) > 0.97
    assert (np.argsort(margin) == np.argsort(two.predict_proba(x[200:])[:, 1], kind="stable")).mean() > 0.9
    flowers, kinds = load_iris(return_X_y=True)
    three = pa.learn.PartitionClassifier(scaling="standard").fit(flowers, kinds)
    outputs = three.decision_function(flowers)
    assert outputs.shape == (150, 3) and (outputs.argmax(axis=1) == three.predict(flowers)).all()


# ---- how large errors are, and which features matter ---------------------------------------------


def test_standard_deviations_follow_the_noise(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, size=(600, 1))
    noise = np.where(x[:, 0] > 0, 0.5, 0.05)
    y = np.sin(x[:, 0]) + noise * rng.normal(size=600)
    model = pa.learn.PartitionRegressor().fit(x[:300], y[:300])
    mean, std = model.predict(x[300:], return_std=True)
    assert np.array_equal(mean, model.predict(x[300:])) and std.shape == (300,)
    loud, quiet = np.median(std[x[300:, 0] > 0.5]), np.median(std[x[300:, 0] < -0.5])
    assert 0.4 < loud < 0.65 and quiet < 0.12
    assert 0.9 < (np.abs(y[300:] - mean) < 2 * std).mean() < 0.99
    even = pa.learn.PartitionRegressor().fit(x[:300], np.sin(x[:300, 0]) + 0.3 * rng.normal(size=300))
    same = even.predict(x[300:], return_std=True)[1]
    assert same.max() < 1.6 * same.min() and np.median(same) == pytest.approx(0.3, rel=0.15)
    monkeypatch.setattr(spread, "_PRIORS", np.array([1e9]))  # negative control: the overall error everywhere
    flat = pa.learn.PartitionRegressor().fit(x[:300], y[:300]).predict(x[300:], return_std=True)[1]
    assert flat.max() < 1.001 * flat.min()


def test_standard_deviations_of_several_outputs_and_of_odd_data():
    x, y = wave(50)
    both = pa.learn.PartitionRegressor().fit(x, np.column_stack([y, 100 * y + x[:, 1]]))
    mean, std = both.predict(x[:7], return_std=True)
    assert mean.shape == std.shape == (7, 2) and (std > 0).all() and (std[:, 1] > 20 * std[:, 0]).all()
    exact = pa.learn.PartitionRegressor().fit(x, np.full(50, 3.0)).predict(x, return_std=True)[1]
    assert (exact < 1e-12).all()
    assert np.isnan(pa.learn.PartitionRegressor().fit(x[:1], y[:1]).predict(x, return_std=True)[1]).all()
    assert "eave-one-out" in pa.learn.PartitionRegressor.predict.__doc__


def test_relevance_is_in_standardised_units_and_scales_are_not():
    rng = np.random.default_rng(3)
    z, units = rng.normal(size=(200, 4)), np.array([1e-3, 1.0, 1e3, 5.0])
    z[:, 3] = 7.0  # constant
    x, y = z * units, np.sin(2 * z[:, 0]) + 0.1 * rng.normal(size=200)
    model = pa.learn.PartitionRegressor().fit(x, y)
    assert model.relevance_.argmax() == 0 and model.relevance_[0] > 2.5 * model.relevance_[1:].max()
    assert model.relevance_ == pytest.approx(model.scale_ * x.std(axis=0)) and model.relevance_[3] == 0
    other = pa.learn.PartitionRegressor().fit(z, y)
    assert other.relevance_ == pytest.approx(model.relevance_, rel=1e-6)
    assert np.abs(np.log(other.scale_[:3] / model.scale_[:3])).max() > 6  # negative control: scales depend on units
    standard = pa.learn.PartitionRegressor(scaling="standard").fit(x[:, :3], x[:, 0])
    assert standard.relevance_ == pytest.approx(np.ones(3))


# ---- files ---------------------------------------------------------------------------------------


def fitted():
    x, y = wave(40, 3)
    labels = np.array(["no", "yes", "può darsi"])[np.digitize(y, [-0.3, 0.4])]
    regress, classify = pa.learn.PartitionRegressor, pa.learn.PartitionClassifier
    return x, {
        "numbers": regress().fit(x, y),
        "affine outputs": regress(x[:6].tolist(), "affine").fit(x, np.column_stack([y, x[:, 0]])),
        "weighted smoother": regress(solver="smoother").fit(x, y, sample_weight=np.arange(40)),
        "strings": classify(class_weight={"no": 2.0}).fit(x, labels),
        "objects": classify(centers=8, random_state=0).fit(x, labels.astype(object)),
        "booleans": classify(scaling="none", class_weight={True: 3.0}).fit(x, y > 0),
        "integers": classify(class_weight="balanced").fit(x, (y > 0) * 7 - 3),
        "one sample": regress().fit(x[:1], y[:1]),
    }


def public(model):
    return {name: value for name, value in vars(model).items() if name.endswith("_") and not name.startswith("_")}


def test_saved_estimators_come_back_bit_for_bit(tmp_path):
    x, models = fitted()
    new = 2 * x + 0.1
    for name, model in models.items():
        back = pa.learn.load(model.save(tmp_path / name))
        assert type(back) is type(model) and np.array_equal(back.predict(new), model.predict(new))
        for attribute, value in public(model).items():
            found = getattr(back, attribute)
            if attribute == "head_":
                assert all(
                    np.array_equal(a, b) for a, b in zip(value.state_dict().values(), found.state_dict().values())
                )
            elif attribute != "partition_":
                assert np.array_equal(found, value, equal_nan=np.asarray(value).dtype.kind == "f"), (name, attribute)
        if hasattr(model, "classes_"):
            assert back.classes_.dtype == model.classes_.dtype and [type(c) for c in back.classes_.tolist()] == [
                type(c) for c in model.classes_.tolist()
            ]
            assert np.array_equal(back.predict_proba(new), model.predict_proba(new))
        else:
            assert np.array_equal(
                back.predict(new, return_std=True)[1], model.predict(new, return_std=True)[1], equal_nan=True
            )
        assert np.array_equal(back.partition_.cell(new), model.partition_.cell(new))
        given, restored = model.get_params(), back.get_params()
        assert given.keys() == restored.keys()
        assert all(np.array_equal(given[key], restored[key]) for key in given), name
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == ["estimator.json", "estimator.safetensors"]
        assert set(public(back)) == set(public(model))


def test_names_of_columns_are_kept(tmp_path):
    pandas = pytest.importorskip("pandas")
    x, y = wave(30)
    frame = pandas.DataFrame(x, columns=["höhe", "width"])
    back = pa.learn.load(pa.learn.PartitionRegressor().fit(frame, y).save(tmp_path / "model"))
    assert back.feature_names_in_.tolist() == ["höhe", "width"]
    with pytest.raises(ValueError, match="feature names"):
        back.predict(frame[["width", "höhe"]])


def test_files_that_were_changed_or_are_something_else_are_refused(tmp_path):
    x, models = fitted()
    place = models["strings"].save(tmp_path / "model")
    with pytest.raises(AlreadyExistsError, match="overwrite"):
        models["numbers"].save(place)
    assert isinstance(pa.learn.load(models["numbers"].save(place, overwrite=True)), pa.learn.PartitionRegressor)
    models["strings"].save(place, overwrite=True)
    text = (place / "estimator.json").read_text()
    (place / "estimator.json").write_text(text.replace('"yes"', '"oui"'))
    with pytest.raises(TamperedFileError, match="seal"):
        pa.learn.load(place)
    (place / "estimator.json").write_text(text)
    data = bytearray((place / "estimator.safetensors").read_bytes())
    data[-3] ^= 1
    (place / "estimator.safetensors").write_bytes(data)
    with pytest.raises(TamperedFileError, match="sha256"):
        pa.learn.load(place)
    (place / "estimator.safetensors").unlink()
    with pytest.raises(TruncatedFileError, match="missing"):
        pa.learn.load(place)
    with pytest.raises(TruncatedFileError, match="does not exist"):
        pa.learn.load(tmp_path / "nothing")
    head = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.2, method="hard").save(tmp_path / "head")
    with pytest.raises((FormatError, TruncatedFileError), match=r"estimator\.json"):
        pa.learn.load(head)
    with pytest.raises(UnsupportedError, match="random_state is a RandomState"):
        pa.learn.PartitionRegressor(random_state=np.random.RandomState(0)).fit(x, x[:, 0]).save(tmp_path / "random")


@pytest.mark.parametrize("name", ["strings", pytest.param("affine outputs", marks=pytest.mark.slow)])
def test_onnx_files_predict_the_same(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    x, models = fitted()
    model, new = models[name], 2 * x[:17] + 0.1
    session = runtime.InferenceSession(model.export_onnx(tmp_path / "model.onnx"))
    (found,) = session.run(None, {"z": new})
    classes = hasattr(model, "classes_")
    expected = model.predict_proba(new) if classes else model.predict(new)
    assert np.abs(found - expected).max() < 1e-8
    told = session.get_modelmeta().custom_metadata_map
    assert told["partita.estimator"] == type(model).__name__
    if classes:
        assert np.array_equal(np.array(json.loads(told["partita.classes"]))[found.argmax(axis=1)], model.predict(new))


# ---- choosing quickly ----------------------------------------------------------------------------


def test_more_centers_than_rows_are_warned_of():
    x, y = wave(12)
    with pytest.warns(UserWarning, match="centers=50, but X has only 12 rows"):
        pa.learn.PartitionRegressor(50).fit(x, y)
    with pytest.warns(UserWarning, match="centers has 30 positions, but X has only 12 rows"):
        pa.learn.PartitionRegressor(wave(30)[0]).fit(x, y)
    pa.learn.PartitionRegressor(12).fit(x, y)  # negative control: warnings are errors here


def test_digits_need_few_factorisations_and_are_read_as_well(monkeypatch):
    """The work of a fit, counted: it used to be 62 eigendecompositions, ten of them of 1,000 keys."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:1200], order[1200:]
    sizes = {"eigen": [], "factor": []}
    for kind, name in (("eigen", "best"), ("factor", "at")):
        own = getattr(search.Ridge, name)

        def counted(self, *args, own=own, kind=kind):
            sizes[kind].append(min(self._keys.num_features, len(self._points)))
            return own(self, *args)

        monkeypatch.setattr(search.Ridge, name, counted)
    model = pa.learn.PartitionClassifier(random_state=0).fit(x[train], y[train])
    assert model.score(x[test], y[test]) > 0.975
    assert max(sizes["eigen"]) <= 128 and len(sizes["eigen"]) <= 25
    assert len(sizes["factor"]) <= 90 and sum(size > 500 for size in sizes["factor"]) <= 20


@pytest.mark.parametrize("data", [load_diabetes, load_iris])
def test_the_descent_ends_near_the_best_of_a_full_search(data, monkeypatch):
    x, y = data(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    targets = (y[:, None] - y.mean()) / y.std() if len(y) > 200 else np.eye(3)[y]
    ask = {"request": search.Request()}
    quick = search.best_fit(x, x, targets, **ask)
    far = replace(quick, share=quick.share * 30, smoother=Smoother(Keys(x, 8 * quick.smoother.keys.rate), targets))
    from_afar = search.best_fit(x, x, targets, near=far, **ask)
    monkeypatch.setattr(search, "_SURVEYED", 10**6)
    full = search.best_fit(x, x, targets, **ask)
    assert max(quick.error, from_afar.error) < 1.02 * full.error
    monkeypatch.undo()
    monkeypatch.setattr(search, "_downhill", lambda *given: None)  # negative control: no step is taken
    assert search.best_fit(x, x, targets, near=far, **ask).error > 1.05 * full.error
