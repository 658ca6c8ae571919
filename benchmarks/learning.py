"""PartitionRegressor and PartitionClassifier beside neighbours, kernel methods and boosted trees on scikit-learn's data.

    python benchmarks/learning.py [--quick | --large | --classify] [--jobs 2] [--json FILE] [--docs docs/learning.md]

Nine data sets, twice five folds. Every method sees the same training points; peers choose their parameters by cross-validation
inside these, over the grids below, ours by its own leave-one-out. One thread per fit; seconds are processor seconds and include
the choosing. Ranks are among the six methods; the row without relevance is shown beside them, not ranked. `--classify` compares
classifiers on larger sets, among them our own with every rate given every penalty, as it used to be.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.interpolate import RBFInterpolator
from scipy.spatial.distance import cdist
from scipy.special import softmax
from scipy.stats import rankdata
from sklearn import datasets
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV, RepeatedKFold, RepeatedStratifiedKFold
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from threadpoolctl import threadpool_limits

from partita.learn import PartitionClassifier, PartitionRegressor, search

Array = NDArray[Any]

OURS = "partita"
UNRANKED = "partita, scaling='standard'"
EXHAUSTIVE = "partita, full search"
BEGIN, END = "<!-- benchmarks/learning.py writes from here -->", "<!-- to here -->"
CLASSIFY_BEGIN, CLASSIFY_END = (
    "<!-- benchmarks/learning.py --classify writes from here -->",
    "<!-- to here, --classify -->",
)


# ---- data ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Data:
    """One data set; `classes` says whether y are labels (accuracy counts) or numbers (R² counts)."""

    name: str
    x: Array
    y: Array
    classes: bool

    def splits(self, folds: int, repeats: int) -> list[tuple[Array, Array]]:
        kind = RepeatedStratifiedKFold if self.classes else RepeatedKFold
        return list(kind(n_splits=folds, n_repeats=repeats, random_state=0).split(self.x, self.y))


def friedman(which: int, noise: float) -> tuple[Array, Array]:
    """500 points; noise in units of the deviation of y for the second and third, whose scales are not 1."""
    x, y = getattr(datasets, f"make_friedman{which}")(500, random_state=0)
    unit = 1.0 if which == 1 else y.std()
    return x, y + noise * unit * np.random.default_rng(which).normal(size=len(y))


def noisy_sine() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, size=(200, 1))
    return x, np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=200)


def some_digits() -> tuple[Array, Array]:
    x, y = datasets.load_digits(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(y))[:600]
    return x[chosen], y[chosen]


def all_data() -> list[Data]:
    made = {
        "diabetes": (datasets.load_diabetes(return_X_y=True), False),
        "friedman1": (friedman(1, 1.0), False),
        "friedman2": (friedman(2, 0.25), False),
        "friedman3": (friedman(3, 0.25), False),
        "noisy sine": (noisy_sine(), False),
        "breast cancer": (datasets.load_breast_cancer(return_X_y=True), True),
        "wine": (datasets.load_wine(return_X_y=True), True),
        "moons": (datasets.make_moons(500, noise=0.3, random_state=0), True),
        "digits (600)": (some_digits(), True),
    }
    return [Data(name, x, y, classes) for name, ((x, y), classes) in made.items()]


def labelled_data() -> list[Data]:
    made = {
        "digits": datasets.load_digits(return_X_y=True),
        "4 classes, 20 features": datasets.make_classification(1500, 20, n_informative=6, n_classes=4, random_state=0),
        "breast cancer": datasets.load_breast_cancer(return_X_y=True),
        "moons": datasets.make_moons(500, noise=0.3, random_state=0),
    }
    return [Data(name, x, y, True) for name, (x, y) in made.items()]


# ---- peers that scikit-learn does not have as both kinds -----------------------------------------


class Numeric(BaseEstimator):
    """A method for numbers: learns centred targets, one-hot for labels, and takes the largest output."""

    def fit(self, x: Array, y: Array) -> Numeric:
        self.labels_ = isinstance(self, ClassifierMixin)
        if self.labels_:
            self.classes_, index = np.unique(y, return_inverse=True)
            y = np.eye(len(self.classes_))[index]
        self.mean_ = y.mean(axis=0)
        self.learn(x, y - self.mean_)
        return self

    def predict(self, x: Array) -> Array:
        out = self.answer(x) + self.mean_
        return self.classes_[out.argmax(axis=1)] if self.labels_ else out


class KernelMethod(Numeric):
    """scikit-learn's kernel ridge regression, Gaussian kernel of width `√(m/2γ)`."""

    def __init__(self, alpha: float = 1.0, gamma: float = 1.0) -> None:
        self.alpha, self.gamma = alpha, gamma

    def learn(self, x: Array, y: Array) -> None:
        self.model_ = KernelRidge(kernel="rbf", alpha=self.alpha, gamma=self.gamma / x.shape[1]).fit(x, y)

    def answer(self, x: Array) -> Array:
        return self.model_.predict(x)


class Splines(Numeric):
    """scipy's RBFInterpolator with smoothing."""

    def __init__(self, kernel: str = "thin_plate_spline", smoothing: float = 1.0) -> None:
        self.kernel, self.smoothing = kernel, smoothing

    def learn(self, x: Array, y: Array) -> None:
        self.model_ = RBFInterpolator(x, y, kernel=self.kernel, smoothing=self.smoothing)

    def answer(self, x: Array) -> Array:
        return self.model_(x)


class NadarayaWatson(Numeric):
    """Gaussian kernel smoother; of 40 rates the one of least leave-one-out error."""

    def learn(self, x: Array, y: Array) -> None:
        squared = cdist(x, x, "sqeuclidean")
        np.fill_diagonal(squared, np.inf)
        self.x_, self.y_ = x, y
        self.rate_ = min(
            np.geomspace(1e-2, 1e3, 40) / x.shape[1],
            key=lambda rate: ((softmax(-rate * squared, axis=1) @ y - y) ** 2).sum(),
        )

    def answer(self, x: Array) -> Array:
        return softmax(-self.rate_ * cdist(x, self.x_, "sqeuclidean"), axis=1) @ self.y_


def of_kind(method: type[Numeric], classes: bool) -> Any:
    mixin = ClassifierMixin if classes else RegressorMixin
    kind = type(method.__name__, (mixin, method), {})
    if "__init__" in vars(method):
        kind.__init__ = method.__init__  # type: ignore[misc]  # scikit-learn reads the parameters here
    return kind()


# ---- methods -------------------------------------------------------------------------------------


def chosen(model: Any, folds: int = 5, **grid: list[Any]) -> GridSearchCV:
    """The model after standardised features, parameters by cross-validation."""
    pipeline = make_pipeline(StandardScaler(), model)
    name = pipeline.steps[-1][0]
    return GridSearchCV(pipeline, {f"{name}__{key}": values for key, values in grid.items()}, cv=folds)


def methods(data: Data) -> dict[str, Callable[[], Any]]:
    ours, trees, nearest = (
        (PartitionClassifier, HistGradientBoostingClassifier, KNeighborsClassifier)
        if data.classes
        else (PartitionRegressor, HistGradientBoostingRegressor, KNeighborsRegressor)
    )
    # thin plates need points that span the space affinely, and some pixels are always black
    kernels = ["linear"] if data.name.startswith("digits") else ["linear", "thin_plate_spline"]
    smoothings = [0.01, 0.1, 1.0, 10.0, 100.0]
    alphas, gammas = [1e-3, 1e-2, 1e-1, 1.0, 10.0], [0.03, 0.1, 0.3, 1.0, 3.0]
    boosted = trees(max_iter=100, random_state=0)
    return {
        OURS: lambda: ours(random_state=0),
        UNRANKED: lambda: ours(scaling="standard", random_state=0),
        "kernel ridge": lambda: chosen(of_kind(KernelMethod, data.classes), alpha=alphas, gamma=gammas),
        "RBF splines": lambda: chosen(of_kind(Splines, data.classes), kernel=kernels, smoothing=smoothings),
        "Nadaraya–Watson": lambda: make_pipeline(StandardScaler(), of_kind(NadarayaWatson, data.classes)),
        "k neighbours": lambda: chosen(nearest(), n_neighbors=[1, 3, 5, 10, 20], weights=["uniform", "distance"]),
        "boosted trees": lambda: chosen(boosted, 3, learning_rate=[0.05, 0.15], max_leaf_nodes=[7, 31]),
    }


class FullSearch(PartitionClassifier):
    """Every rate that is tried gets the best of 45 penalties, by an eigendecomposition with all keys."""

    def fit(self, X: Array, y: Array, sample_weight: Array | None = None) -> FullSearch:
        with mock.patch.object(search, "_SURVEYED", 10**9):
            super().fit(X, y, sample_weight)
        return self


def classifiers(data: Data) -> dict[str, Callable[[], Any]]:
    named = methods(data)
    return {
        OURS: named[OURS],
        EXHAUSTIVE: lambda: FullSearch(random_state=0),
        "SVC": lambda: chosen(SVC(), C=[0.1, 1.0, 10.0, 100.0], gamma=["scale", 0.003, 0.01, 0.03, 0.1]),
        "kernel ridge": named["kernel ridge"],
        "k neighbours": named["k neighbours"],
        "boosted trees": named["boosted trees"],
    }


@dataclass(frozen=True)
class Row:
    """One method on one split of one data set."""

    data: str
    method: str
    split: int
    score: float
    seconds: float


def measure(data: Data, method: str, split: int, rows: tuple[Array, Array], *, classify: bool = False) -> Row:
    train, test = rows
    model = (classifiers if classify else methods)(data)[method]()
    with threadpool_limits(1):
        began = time.process_time()
        model.fit(data.x[train], data.y[train])
        seconds = time.process_time() - began
        return Row(data.name, method, split, float(model.score(data.x[test], data.y[test])), seconds)


# ---- what is printed -----------------------------------------------------------------------------


def grouped(rows: list[Row], field: str) -> dict[tuple[str, str], Array]:
    """`(data, method)` to the values over the splits."""
    out: dict[tuple[str, str], list[float]] = {}
    for row in sorted(rows, key=lambda r: r.split):
        out.setdefault((row.data, row.method), []).append(getattr(row, field))
    return {key: np.array(values) for key, values in out.items()}


def ranks(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Mean rank of each ranked method: of its mean score on each data set, and of its score on each split."""
    scores = grouped(rows, "score")
    names = list(dict.fromkeys(row.method for row in rows if row.method != UNRANKED))
    table = [np.array([scores[data, name] for name in names]) for data in dict.fromkeys(row.data for row in rows)]
    by_data = np.mean([rankdata(-part.mean(axis=1)) for part in table], axis=0)
    by_split = np.mean([rankdata(-part, axis=0).mean(axis=1) for part in table], axis=0)
    return {name: (float(a), float(b)) for name, a, b in zip(names, by_data, by_split)}


def table(rows: list[Row]) -> Table:
    out = Table(box=box.MARKDOWN)
    scores, seconds, ranked = grouped(rows, "score"), grouped(rows, "seconds"), ranks(rows)
    names = list(dict.fromkeys(row.method for row in rows))
    for name in ["", *names]:
        out.add_column(name, justify="right" if name else "left", no_wrap=True)
    for data in dict.fromkeys(row.data for row in rows):
        best = max(scores[data, name].mean() for name in ranked)
        cells = []
        for name in names:
            s = scores[data, name]
            text = f"{s.mean():.3f} ± {s.std():.3f}"
            cells.append(f"**{text}**" if name in ranked and s.mean() == best else text)
        out.add_row(data, *cells)
    for which, label in ((0, "mean rank, data sets"), (1, "mean rank, splits")):
        out.add_row(label, *(f"{ranked[name][which]:.2f}" if name in ranked else "–" for name in names))
    total = [np.mean([s.mean() for (_, name), s in seconds.items() if name == wanted]) for wanted in names]
    out.add_row("seconds to fit", *(f"{t:.2f}" for t in total))
    return out


def classify_table(rows: list[Row]) -> Table:
    """Accuracy and processor seconds of a fit, choosing included."""
    out = Table(box=box.MARKDOWN)
    scores, seconds = grouped(rows, "score"), grouped(rows, "seconds")
    names = list(dict.fromkeys(row.method for row in rows))
    for name in ["", *names]:
        out.add_column(name, justify="right" if name else "left", no_wrap=True)
    for data in dict.fromkeys(row.data for row in rows):
        cells = (f"{scores[data, name].mean():.3f}, {np.median(seconds[data, name]):.2f} s" for name in names)
        out.add_row(data, *cells)
    return out


def large() -> Table:
    """One fit on 1,000 to 10,000 points of friedman1, which has 5 features that matter whatever their number."""
    out = Table(box=box.MARKDOWN)
    for name in (
        "n",
        "m",
        "keys",
        "seconds to fit",
        "seconds for 2,000 predictions",
        "R²",
        "leave-one-out R²",
        "peak MiB",
    ):
        out.add_column(name, justify="right", no_wrap=True)
    for n, m in ((1_000, 10), (10_000, 10), (10_000, 100)):
        x, y = datasets.make_friedman1(n + 2000, m, noise=1.0, random_state=0)
        clock = [time.process_time()]
        model = PartitionRegressor(random_state=0).fit(x[:n], y[:n])
        clock.append(time.process_time())
        score = model.score(x[n:], y[n:])
        clock.append(time.process_time())
        times = [f"{b - a:.2f}" for a, b in pairwise(clock)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 << 20 if sys.platform == "darwin" else 1 << 10)
        out.add_row(
            f"{n:,}", str(m), f"{len(model.centers_):,}", *times, f"{score:.3f}", f"{model.loo_score_:.3f}", str(peak)
        )
    return out


def written(page: str, text: str, begin: str, end: str) -> str:
    """The page with the text between the marks replaced."""
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small data sets, three folds")
    parser.add_argument("--large", action="store_true", help="one fit each on up to 10,000 points, nothing else")
    parser.add_argument("--classify", action="store_true", help="classifiers on larger sets, three folds")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--docs", type=Path, help="replace the table on this page")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.large:
        Console(width=220).print(large())
        return 0
    named: Callable[[Data], dict[str, Callable[[], Any]]] = classifiers if options.classify else methods
    data = labelled_data() if options.classify else all_data()
    data = [d for d in data if not options.quick or d.name in ("diabetes", "noisy sine", "wine")]
    folds, repeats = (3, 1) if options.quick or options.classify else (5, 2)
    jobs = [
        delayed(measure)(d, method, number, rows, classify=options.classify)
        for d in data
        for number, rows in enumerate(d.splits(folds, repeats))
        for method in named(d)
    ]
    began = time.perf_counter()
    rows: list[Row] = Parallel(n_jobs=options.jobs, batch_size=1)(jobs)
    console = Console(width=220, record=True)
    console.print(classify_table(rows) if options.classify else table(rows))
    text = console.export_text(clear=False)
    console.print(f"{len(rows)} fits in {time.perf_counter() - began:.0f} s, {options.jobs} processes of one thread")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.docs:
        marks = (CLASSIFY_BEGIN, CLASSIFY_END) if options.classify else (BEGIN, END)
        options.docs.write_text(written(options.docs.read_text(), text, *marks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
