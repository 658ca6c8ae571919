"""PartitionRegressor and PartitionClassifier: scikit-learn estimators that are one softmax-attention head."""

from __future__ import annotations

import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn

from partita.errors import FormatError, PartitaError, UnsupportedError
from partita.geometry.domains import Array
from partita.geometry.partitions import PowerDiagram
from partita.heads.head import FoldedHead
from partita.heads.scattered_head import ScatteredHead
from partita.learn.folding import Scaling, fold
from partita.learn.model import Options, fit_model, moments
from partita.learn.parallel import Jobs
from partita.learn.search import spacing
from partita.learn.smoothing import Keys, Smoother
from partita.learn.spread import local_variances
from partita.learn.stored import Record, decoded_labels, encoded_labels, read_record, write_record
from partita.storage import export_onnx

__all__ = ["PartitionClassifier", "PartitionRegressor", "load"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows that count: those of positive weight, each different row once, in an order that does not depend on theirs.

    A row that occurs twice is a row of twice the weight, and both copies are left out together.

    Attributes:
        first: where each occurs first, `(n,)`.
        number: which of these each given row is, −1 for rows of weight 0.
        weights: `(n,)`.
    """

    first: NDArray[np.int64]
    number: NDArray[np.int64]
    weights: Array

    @classmethod
    def of(cls, points: Array, targets: Array, weights: Array) -> _Rows:
        kept = np.flatnonzero(weights > 0)
        if not len(kept):
            raise ValueError("sample_weight is zero for every row; expected at least one positive weight.")
        both = np.hstack([points, targets])[kept]
        order = np.lexsort(both.T[::-1])  # stable: of equal rows the first comes first
        new = np.append(True, (both[order[1:]] != both[order[:-1]]).any(axis=1))
        number = np.full(len(points), -1)
        number[kept[order]] = np.cumsum(new) - 1
        totals: Array = np.bincount(number[kept], weights=weights[kept]).astype(np.float64)
        return cls(kept[order[new]], number, totals)


@dataclass(frozen=True, eq=False)
class _State:
    """What is fitted, and all that is saved. Public attributes are made from it, after a fit and after loading alike."""

    smoother: Smoother
    scaling: Scaling
    deviation: Array  # of the features
    spread: Smoother | None  # squared errors around x, with the same centers
    left_out: Array  # (n, out), of the rows as they were given
    penalty: float
    degrees_of_freedom: float
    effective_keys: float
    loo_error: float
    distinct: float  # rows

    def in_rows(self) -> _State:
        """The same with arrays that lie in memory as loaded ones do, so that sums round alike."""
        return _State.of({name: np.ascontiguousarray(a) for name, a in self.arrays().items()}, self.numbers())

    def arrays(self) -> dict[str, Array]:
        keys = self.smoother.keys
        found = {
            "centers": keys.centers,
            "bias": keys.bias,
            "values": self.smoother.values,
            "slopes": self.smoother.slopes,
            "mean": self.scaling.mean,
            "scale": self.scaling.scale,
            "deviation": self.deviation,
            "variances": None if self.spread is None else self.spread.values,
            "left_out": self.left_out,
        }
        return {name: array for name, array in found.items() if array is not None and np.isfinite(array).all()}

    def numbers(self) -> dict[str, float]:
        own = ("penalty", "degrees_of_freedom", "effective_keys", "loo_error", "distinct")
        rates = {"rate": self.smoother.keys.rate, "spread_rate": 0.0 if self.spread is None else self.spread.keys.rate}
        return {**rates, **{name: getattr(self, name) for name in own}}

    @classmethod
    def of(cls, arrays: Mapping[str, Array], numbers: Mapping[str, float]) -> _State:
        """Raises a FormatError or a LookupError if the parts do not fit together."""
        (count, m), out = arrays["centers"].shape, arrays["values"].shape[1]
        shapes = {"centers": (count, m), "values": (count, out), "bias": (count,), "slopes": (count, out, m)}
        shapes |= {"mean": (m,), "scale": (m,), "deviation": (m,), "variances": (count, out)}
        for name, array in arrays.items():
            expected = shapes.get(name, (len(array), out))
            if array.shape != expected or array.dtype != np.float64:
                raise FormatError(f"{name} has shape {array.shape}, {array.dtype}; expected {expected}, float64.")
        rate, slopes = numbers["rate"], arrays.get("slopes")
        if not 0 < rate < np.inf:
            raise FormatError(f"the inverse temperature is {rate}; expected a positive number.")
        keys = Keys(arrays["centers"], rate, slopes is not None, arrays.get("bias"))
        left_out = arrays.get("left_out", np.full((1, out), np.nan))  # of one sample
        own = {name: value for name, value in numbers.items() if name in cls.__dataclass_fields__}
        scaling = Scaling(arrays["mean"], arrays["scale"])
        smoother, spread = Smoother(keys, arrays["values"], slopes), None
        if "variances" in arrays:
            spread = Smoother(Keys(keys.centers, numbers["spread_rate"]), arrays["variances"])
        return cls(smoother, scaling, arrays["deviation"], spread, left_out, **own)


class _Probabilities(nn.Module):
    """`softmax(β·head(x))`, for ONNX."""

    def __init__(self, head: ScatteredHead, sharpness: float) -> None:
        super().__init__()
        self.head, self.sharpness = head, sharpness
        self.input_shapes, self.dtype, self.semantics = head.input_shapes, head.dtype, head.semantics

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = (self.sharpness * self.head(*inputs)).softmax(dim=-1)
        return out


class _PartitionModel(BaseEstimator, ABC):
    """What the two estimators share: fit targets `(n, out)`, fold into a head, evaluate, save."""

    centers_: Array
    values_: Array
    value_slopes_: Array | None
    head_: ScatteredHead
    partition_: PowerDiagram
    n_features_in_: int

    def __init__(
        self,
        centers: Any = "auto",
        values: str = "auto",
        *,
        solver: str = "ridge",
        inverse_temperature: float | None = None,
        ridge: float | None = None,
        scaling: str = "auto",
        random_state: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        self.centers = centers
        self.values = values
        self.solver = solver
        self.inverse_temperature = inverse_temperature
        self.ridge = ridge
        self.scaling = scaling
        self.random_state = random_state
        self.n_jobs = n_jobs

    def _fit_targets(self, points: Array, targets: Array, weights: Array, *, standardise: bool, spread: bool) -> _State:
        """Fit, and set what both kinds of estimator show."""
        chosen = self.centers, self.values, self.solver, self.inverse_temperature, self.ridge, self.scaling
        options = Options(*chosen, Jobs(self.n_jobs))
        _warn_of_many_centers(self.centers, len(points))
        given, rows = points, _Rows.of(points, targets, weights)
        points, targets, weights = points[rows.first], targets[rows.first], rows.weights
        mean, deviation = moments(targets, weights)
        unit = np.where(standardise & (deviation > 0), deviation, 1.0)
        shift = mean if standardise else np.zeros_like(mean)
        rng = check_random_state(self.random_state)
        # small matrices: threads would wait for each other longer than they work
        with ThreadpoolController().limit(limits=1):
            scaling, fit = fit_model(points, (targets - shift) / unit, weights, options, rng=rng)
            scaled = scaling(points)
            smoother, errors = fit.smoother, None
            if np.array_equal(smoother.keys.centers, scaled):  # keys that are the rows: as the rows were given
                smoother = _in_order(smoother, np.argsort(rows.first))
            if spread and len(points) > 1:
                squares = (fit.left_out * unit + shift - targets) ** 2
                errors = local_variances(smoother.keys.centers, scaled, squares, weights)
            slopes = None if smoother.slopes is None else smoother.slopes * unit[:, None]
            smoother = Smoother(smoother.keys, shift + smoother.values * unit, slopes)
            once = shift + fit.left_out * unit
            left_out = once[rows.number]
            if (rows.number < 0).any():  # rows that the fit never saw
                left_out[rows.number < 0] = smoother(scaling(given[rows.number < 0]))
            state = _State(
                smoother,
                scaling,
                moments(points, weights)[1],
                errors,
                left_out,
                fit.penalty,
                fit.degrees_of_freedom,
                smoother.effective_keys(scaled, weights),
                float(np.average((once - targets) ** 2, axis=0, weights=weights).mean()),
                float(len(points)),
            ).in_rows()
        return state

    def _adopt(self, state: _State, *, output_shape: tuple[int, ...]) -> None:
        """Set the public attributes."""
        self._state = state
        smoother, scaling = state.smoother, state.scaling
        self.centers_ = scaling.inverse(smoother.keys.centers)
        self.values_ = smoother.values
        self.value_slopes_ = None if smoother.slopes is None else smoother.slopes * scaling.scale
        self.mean_, self.scale_ = scaling.mean, scaling.scale
        self.relevance_ = scaling.scale * state.deviation
        self.inverse_temperature_ = smoother.keys.rate
        self.sharpness_ = smoother.keys.rate * spacing(smoother.keys.centers) ** 2
        self.ridge_ = state.penalty
        self.degrees_of_freedom_ = state.degrees_of_freedom
        self.effective_keys_ = state.effective_keys
        self.loo_error_ = state.loo_error
        self.head_, self.partition_ = fold(smoother, scaling, state.deviation, output_shape=output_shape)

    def _scaled(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        return self._state.scaling(validate_data(self, X, dtype=np.float64, reset=False))

    def _outputs(self, X: ArrayLike) -> Array:
        scaled = self._scaled(X)  # checks first that there was a fit
        return self._state.smoother(scaled)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `estimator.json` and `estimator.safetensors` to a folder, both or none. `partita.learn.load` reads them.

        What is loaded predicts the same numbers, bit for bit, and has the same attributes. Nothing is pickled.

        Args:
            folder: where to write. Parents are created.
            overwrite: replace an estimator that was saved there.

        Returns:
            The folder.

        Raises:
            AlreadyExistsError: the folder exists and overwrite is False.
            UnsupportedError: labels or parameters of a type that is not saved, such as a `RandomState`.
        """
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        facts = {
            "features": int(self.n_features_in_),
            "names": None if names is None else [str(name) for name in names],
            **self._facts(),
        }
        numbers = {**self._state.numbers(), **self._numbers()}
        kind, parameters = type(self).__name__, self.get_params(deep=False)
        return write_record(Record(kind, parameters, numbers, facts, self._state.arrays()), folder, overwrite=overwrite)

    def export_onnx(self, path: str | os.PathLike[str]) -> Path:
        """Write the model as an ONNX file: input `z`, raw features `(n, m)` in float64; output `value`.

        A regressor returns what `predict` does, a classifier what `predict_proba` does; the labels are in the metadata of the
        file under `partita.classes`, as JSON. Both agree with scikit-learn's side to rounding, see docs/learning.md.

        Args:
            path: the file to write.

        Returns:
            The path.

        Raises:
            MissingExtraError: the extra `onnx` is not installed.
        """
        check_is_fitted(self)
        return export_onnx(self._exported(), path, metadata=self._metadata())

    def _exported(self) -> FoldedHead:
        return self.head_

    def _metadata(self) -> dict[str, str]:
        return {"partita.estimator": type(self).__name__}

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """What else is saved, as JSON."""

    @abstractmethod
    def _numbers(self) -> dict[str, float]:
        """What else is saved, as numbers."""

    @abstractmethod
    def _restore(self, state: _State, record: Record) -> None:
        """Set every attribute from what was saved."""


def _row_weights(given: ArrayLike | None, rows: int) -> Array:
    """One weight per row, finite and at least 0; scikit-learn expects a ValueError for anything else."""
    if given is None:
        return np.ones(rows)
    weights = np.asarray(given, dtype=np.float64)
    if weights.shape not in ((), (rows,)):
        raise ValueError(f"sample_weight has shape {weights.shape}; expected ({rows},), one number per row of X.")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("sample_weight has entries that are negative, NaN or infinite; expected finite numbers ≥ 0.")
    return np.broadcast_to(weights, (rows,))


def _warn_of_many_centers(centers: Any, rows: int) -> None:
    if isinstance(centers, (int, np.integer)) and centers > rows:
        warnings.warn(
            f"centers={centers}, but X has only {rows:,} rows: every row becomes a center. Ask for at most {rows:,}, or 'auto'.",
            UserWarning,
            stacklevel=4,
        )
    elif not isinstance(centers, str) and np.ndim(centers) == 2 and len(centers) > rows:
        warnings.warn(
            f"centers has {len(centers):,} positions, but X has only {rows:,} rows: most values follow from the ridge alone.",
            UserWarning,
            stacklevel=4,
        )


def _in_order(smoother: Smoother, order: NDArray[np.int64]) -> Smoother:
    """The same head with its keys in another order."""
    keys, slopes = smoother.keys, smoother.slopes
    moved = replace(keys, centers=keys.centers[order], bias=None if keys.bias is None else keys.bias[order])
    return Smoother(moved, smoother.values[order], None if slopes is None else slopes[order])


class PartitionRegressor(RegressorMixin, _PartitionModel):
    """Regression by one softmax-attention head, `Σ_j softmax_j(−R|x̃ − c_j|²/2)·V_j(x̃)`, x̃ the scaled features.

    What is left open is chosen by the error of leaving each point out, in closed form: R, the ridge λ of the values, whether
    they have slopes, the scales of the features. docs/learning.md has the formulas.

    Args:
        centers: "auto" (every point up to 1000, else the means of k-means), their number, or raw positions `(N, m)`.
        values: "constant", "affine" (`V_j + J_j(x̃ − c_j)`), or "auto": whichever leaves less error.
        solver: "ridge" (values solved for) or "smoother" (the targets themselves: Nadaraya–Watson).
        inverse_temperature: R in scaled features, or None.
        ridge: λ, or None.
        scaling: "standard" (zero mean, unit deviation), "none", or "auto": standard, then by relevance where that clearly helps.
        random_state: for k-means and for the sample on which relevance is judged; up to 600 points nothing is random.
        n_jobs: how many parts of a fit run at the same time (temperatures that are tried, blocks of rows), as everywhere in
            scikit-learn: None for 1 or for what `joblib.parallel_config` says, −1 for all processors. The result is the same.

    Attributes:
        head_: a `ScatteredHead` (an `nn.Module`) that takes raw features.
        partition_: its cells, in raw space.
        centers_, values_, value_slopes_: raw `(N, m)`, `(N, out)`, `(N, out, m)` or None.
        mean_, scale_: μ, S of `x̃ = S(x − μ)`. A scale has the inverse unit of its feature, so that scales of features in
            different units cannot be compared.
        relevance_: S times the standard deviations of the features, `(m,)`: how far one standard deviation of a feature moves
            x̃. These can be compared: the larger, the more the head looks at the feature. All 1 if scaling is "standard".
        inverse_temperature_: R.
        ridge_: λ.
        sharpness_: κ = R h², h the root mean square distance between neighbouring centers in scaled features.
        effective_keys_: mean of `1/Σ_j w_j²` over the data.
        degrees_of_freedom_: the trace of the hat matrix.
        loo_predictions_: `(n,)` or `(n, out)`, each by the fit without that point (and without its exact copies).
        loo_error_: their mean squared error.
        loo_score_: their R². All three are nan for one sample, and flattered by what the scales have seen of y.

    >>> x = np.linspace(0, 6, 40)[:, None]
    >>> model = PartitionRegressor().fit(x, np.sin(x[:, 0]))
    >>> bool(np.abs(model.predict(x + 0.01) - np.sin(x[:, 0] + 0.01)).max() < 1e-2)
    True
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> PartitionRegressor:
        """Fit the head to data.

        Args:
            X: features `(n, m)`.
            y: targets `(n,)` or `(n, out)`.
            sample_weight: how much each row counts, `(n,)`, or None for 1 each. Weight 0 is the same as leaving the row out,
                weight 2 the same as a second copy. Copies are left out together, so that weights that are all equal change
                nothing, unless `ridge` is given.
        """
        points, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        targets = np.asarray(y, dtype=np.float64)
        self._flat = targets.ndim == 1
        columns = targets.reshape(len(targets), -1)
        weights = _row_weights(sample_weight, len(points))
        state = self._fit_targets(points, columns, weights, standardise=True, spread=True)
        scored = r2_score(columns, state.left_out, sample_weight=weights) if (weights > 0).sum() > 1 else np.nan
        self._adopt_all(state, score=float(scored))
        return self

    def _adopt_all(self, state: _State, *, score: float) -> None:
        self._adopt(state, output_shape=() if self._flat else state.left_out.shape[1:])
        self.loo_predictions_ = state.left_out[:, 0] if self._flat else state.left_out
        self.loo_score_ = score

    def predict(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Predictions and, with return_std=True, the typical leave-one-out error around each point.

        The second array is `√(Σ_j u_j(x)·v_j)`, where v_j is the mean squared leave-one-out error of the data around key j and u
        are softmax weights over the same keys. How far "around" reaches, and how far v_j is drawn towards the overall mean, is
        what makes the leave-one-out errors most likely; it is nearly constant unless they clearly differ between places.

        It is the typical size of `y − predict(x)` for new data at such x, noise included. It is *not* a confidence interval of the
        mean function, it says nothing about the shape of the errors, it is not a bound, and it does not grow away from the
        data: there it is that of the nearest keys. It is too optimistic in the same way as `loo_error_`, and
        NaN after a fit to one sample.

        Args:
            X: features `(n, m)`.
            return_std: whether to return the second array.

        Returns:
            `(n,)`, or `(n, out)` if y had two axes; with `return_std` a pair of such arrays.

        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> y = x[:, 0] + np.resize([0.1, -0.1], 60)
        >>> mean, std = PartitionRegressor().fit(x, y).predict([[0.5]], return_std=True)
        >>> bool(0.08 < std[0] < 0.15)
        True
        """
        scaled = self._scaled(X)
        outputs = self._state.smoother(scaled)
        mean = outputs[:, 0] if self._flat else outputs
        if not return_std:
            return mean
        if self._state.spread is None:
            return mean, np.full_like(mean, np.nan)
        std = np.sqrt(self._state.spread(scaled))
        return mean, std[:, 0] if self._flat else std

    def _facts(self) -> dict[str, Any]:
        return {"flat": self._flat}

    def _numbers(self) -> dict[str, float]:
        return {"loo_score": self.loo_score_}

    def _restore(self, state: _State, record: Record) -> None:
        self._flat = record.facts["flat"] is True
        if self._flat and state.left_out.shape[1] != 1:
            raise FormatError(
                f"the model has {state.left_out.shape[1]} outputs; expected one, as its targets had one axis."
            )
        self._adopt_all(state, score=record.numbers["loo_score"])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class PartitionClassifier(ClassifierMixin, _PartitionModel):
    """Classification by one softmax-attention head whose values are fitted to one-hot classes.

    The class is the largest output; `predict_proba` is the softmax of β times the outputs, β of least leave-one-out log-loss.
    The other arguments and attributes are those of `PartitionRegressor`, but for `loo_predictions_`: outputs `(n, classes)`,
    `loo_error_`: their mean squared distance from one-hot, `loo_score_`: their accuracy, both weighted.

    Args:
        class_weight: what the weights of rows are multiplied by: None for nothing, "balanced" for
            `total weight/(classes · weight of the class)`, or a dict from labels to numbers, 1 for labels that it lacks.

    Attributes:
        classes_: the labels, sorted.
        proba_sharpness_: β.

    >>> x = np.array([[0.0], [0.1], [0.9], [1.0]])
    >>> PartitionClassifier().fit(x, ["no", "no", "yes", "yes"]).predict([[0.2], [0.8]]).tolist()
    ['no', 'yes']
    """

    def __init__(
        self,
        centers: Any = "auto",
        values: str = "auto",
        *,
        solver: str = "ridge",
        inverse_temperature: float | None = None,
        ridge: float | None = None,
        scaling: str = "auto",
        class_weight: Any = None,
        random_state: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        super().__init__(
            centers,
            values,
            solver=solver,
            inverse_temperature=inverse_temperature,
            ridge=ridge,
            scaling=scaling,
            random_state=random_state,
            n_jobs=n_jobs,
        )
        self.class_weight = class_weight

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> PartitionClassifier:
        """Fit the head to data.

        Args:
            X: features `(n, m)`.
            y: labels of any kind, `(n,)`.
            sample_weight: how much each row counts, `(n,)`, or None for 1 each; see `PartitionRegressor.fit`.
        """
        points, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        weights = _row_weights(sample_weight, len(points))
        weights = weights * _class_weights(self.class_weight, self.classes_, index, weights)[index]
        one_hot = np.eye(len(self.classes_))[index]
        state = self._fit_targets(points, one_hot, weights, standardise=False, spread=False)
        right = state.left_out.argmax(axis=1) == index
        score = float(np.average(right, weights=weights)) if (weights > 0).sum() > 1 else float("nan")
        self._adopt_all(state, score=score, sharpness=_calibrated(state, index, weights))
        return self

    def _adopt_all(self, state: _State, *, score: float, sharpness: float) -> None:
        self._adopt(state, output_shape=(len(self.classes_),))
        self.loo_predictions_ = state.left_out
        self.loo_score_, self.proba_sharpness_ = score, sharpness

    def decision_function(self, X: ArrayLike) -> Array:
        """The outputs that decide: one column per class, the largest wins.

        With two classes it is their difference, positive for `classes_[1]`, as in the rest of scikit-learn.

        Args:
            X: features `(n, m)`.

        Returns:
            `(n, classes)`, or `(n,)` for two classes.
        """
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict_proba(self, X: ArrayLike) -> Array:
        """Positive numbers whose rows sum to 1, largest where the head's output is.

        Args:
            X: features `(n, m)`.

        Returns:
            `(n, classes)`.
        """
        outputs = self._outputs(X)
        out: Array = softmax(self.proba_sharpness_ * outputs, axis=1)
        return out

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The label of the largest output.

        Args:
            X: features `(n, m)`.

        Returns:
            `(n,)`.
        """
        outputs = self._outputs(X)
        out: NDArray[Any] = self.classes_[outputs.argmax(axis=1)]
        return out

    def _exported(self) -> FoldedHead:
        return cast(FoldedHead, _Probabilities(self.head_, self.proba_sharpness_))  # has what the exporter asks for

    def _metadata(self) -> dict[str, str]:
        return {**super()._metadata(), "partita.classes": json.dumps(self.classes_.tolist(), default=str)}

    def _facts(self) -> dict[str, Any]:
        return {"classes": encoded_labels(self.classes_)}

    def _numbers(self) -> dict[str, float]:
        return {"loo_score": self.loo_score_, "proba_sharpness": self.proba_sharpness_}

    def _restore(self, state: _State, record: Record) -> None:
        self.classes_ = decoded_labels(record.facts["classes"])
        if len(self.classes_) != state.smoother.values.shape[1]:
            raise FormatError(
                f"there are {len(self.classes_)} labels and {state.smoother.values.shape[1]} outputs; expected as many."
            )
        numbers = record.numbers
        self._adopt_all(state, score=numbers["loo_score"], sharpness=numbers["proba_sharpness"])


def load(folder: str | os.PathLike[str]) -> PartitionRegressor | PartitionClassifier:
    """Read an estimator that `save` wrote. Hashes and shapes are checked; nothing is evaluated or unpickled.

    Args:
        folder: what was saved.

    Raises:
        TruncatedFileError: a file is missing or cut off.
        TamperedFileError: a file was changed after it was written.
        NewerVersionError: the format is newer than this version.
        FormatError: anything else that is not a saved estimator.

    >>> import tempfile, pathlib
    >>> model = PartitionClassifier().fit([[0.0], [0.2], [0.8], [1.0]], ["no", "no", "yes", "yes"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(model.save(pathlib.Path(folder) / "model")).predict([[0.1]]).tolist()
    ['no']
    """
    record = read_record(folder)
    kinds = {kind.__name__: kind for kind in (PartitionRegressor, PartitionClassifier)}
    try:
        if record.kind not in kinds:
            raise FormatError(f"{folder} is a {record.kind!r}; expected one of {', '.join(kinds)}.")
        model: PartitionRegressor | PartitionClassifier = kinds[record.kind](**record.parameters)
        model._restore(_State.of(record.arrays, record.numbers), record)
        model.n_features_in_ = len(model.mean_)
        if record.facts["names"] is not None:
            model.feature_names_in_ = np.array(record.facts["names"], dtype=object)
    except PartitaError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{folder} does not contain a valid estimator: {type(error).__name__}: {error}") from None
    return model


def _class_weights(given: Any, classes: NDArray[Any], index: NDArray[np.int64], weights: Array) -> Array:
    """One factor per class."""
    if given is None:
        return np.ones(len(classes))
    if isinstance(given, str) and given == "balanced":
        totals = np.bincount(index, weights=weights, minlength=len(classes))
        out: Array = np.divide(totals.sum() / len(classes), totals, out=np.zeros(len(classes)), where=totals > 0)
        return out
    if not isinstance(given, Mapping):
        raise UnsupportedError(
            f"class_weight is {given!r}; expected None, 'balanced' or a dict from labels to numbers."
        )
    unknown = [label for label in given if label not in classes.tolist()]
    if unknown:
        raise UnsupportedError(
            f"class_weight has weights for {unknown!r}; expected labels that occur in y: {classes.tolist()}."
        )
    out = np.array([float(given.get(label, 1.0)) for label in classes.tolist()])
    if not (np.isfinite(out).all() and (out >= 0).all()):
        raise UnsupportedError(f"class_weight is {given!r}; expected finite weights ≥ 0.")
    return out


def _calibrated(state: _State, index: NDArray[np.int64], weights: Array) -> float:
    """β between e⁻² and e⁵ that minimises `−Σ_i s_i log softmax(β·left_out_i)[y_i] + s̄ log(1 + e^{βg})`; 1 if nothing was left out.

    The last term is one imagined miss by the mean margin g: without it β would be infinite for classes that n points separate.
    """
    counted = weights > 0
    left_out, index, weights = state.left_out[counted], index[counted], weights[counted]
    if left_out.shape[1] < 2 or not np.isfinite(left_out).all():
        return 1.0
    rows, weights = np.arange(len(index)), weights * (state.distinct / weights.sum())
    margin = float(weights @ np.diff(np.partition(left_out, -2, axis=1)[:, -2:], axis=1)[:, 0] / weights.sum())

    def loss(log_beta: float) -> float:
        beta = np.exp(log_beta)
        return float(np.logaddexp(0.0, beta * margin) - weights @ log_softmax(beta * left_out, axis=1)[rows, index])

    return float(np.exp(minimize_scalar(loss, bounds=(-2.0, 5.0), method="bounded").x))
