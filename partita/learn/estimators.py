"""PartitionRegressor and PartitionClassifier: scikit-learn estimators that are one softmax-attention head."""

from __future__ import annotations

from abc import ABC
from typing import Any

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

from partita.geometry.domains import Array
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead
from partita.learn.folding import fold
from partita.learn.model import Options, fit_model
from partita.learn.search import spacing
from partita.learn.smoothing import Smoother

__all__ = ["PartitionClassifier", "PartitionRegressor"]


class _PartitionModel(BaseEstimator, ABC):
    """What the two estimators share: fit targets `(n, out)`, fold into a head, evaluate."""

    centers_: Array
    values_: Array
    value_slopes_: Array | None
    head_: ScatteredHead
    partition_: PowerDiagram

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
    ) -> None:
        self.centers = centers
        self.values = values
        self.solver = solver
        self.inverse_temperature = inverse_temperature
        self.ridge = ridge
        self.scaling = scaling
        self.random_state = random_state

    def _fit_targets(self, points: Array, targets: Array, *, output_shape: tuple[int, ...], standardise: bool) -> Array:
        """Fit, set what is public, and return the leave-one-out predictions `(n, out)`."""
        options = Options(self.centers, self.values, self.solver, self.inverse_temperature, self.ridge, self.scaling)
        mean, deviation = targets.mean(axis=0), targets.std(axis=0)
        unit = np.where(standardise & (deviation > 1e-14 * np.abs(targets).max(axis=0)), deviation, 1.0)
        shift = mean if standardise else np.zeros_like(mean)
        rng = check_random_state(self.random_state)
        # small matrices: threads would wait for each other longer than they work
        with ThreadpoolController().limit(limits=1):
            scaling, fit = fit_model(points, (targets - shift) / unit, np.ones(len(points)), options, rng=rng)
        slopes = None if fit.smoother.slopes is None else fit.smoother.slopes * unit[:, None]
        self._smoother = Smoother(fit.smoother.keys, shift + fit.smoother.values * unit, slopes)
        self._scaling = scaling
        self._describe(scaling(points), fit.penalty, fit.degrees_of_freedom)
        self.head_, self.partition_ = fold(self._smoother, scaling, points.std(axis=0), output_shape=output_shape)
        left_out: Array = shift + fit.left_out * unit
        self.loo_error_ = float(((left_out - targets) ** 2).mean())
        return left_out

    def _describe(self, scaled: Array, penalty: float, degrees: float) -> None:
        keys = self._smoother.keys
        self.centers_ = self._scaling.inverse(keys.centers)
        self.values_ = self._smoother.values
        self.value_slopes_ = None if self._smoother.slopes is None else self._smoother.slopes * self._scaling.scale
        self.mean_, self.scale_ = self._scaling.mean, self._scaling.scale
        self.inverse_temperature_ = keys.rate
        self.sharpness_ = keys.rate * spacing(keys.centers) ** 2
        self.ridge_ = penalty
        self.degrees_of_freedom_ = degrees
        self.effective_keys_ = self._smoother.effective_keys(scaled)

    def _outputs(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        return self._smoother(self._scaling(validate_data(self, X, dtype=np.float64, reset=False)))


class PartitionRegressor(RegressorMixin, _PartitionModel):
    """Regression by one softmax-attention head, `Σ_j softmax_j(−R|x̃ − c_j|²/2)·V_j(x̃)`, x̃ the scaled features.

    What is left open is chosen by the error of leaving each point out, in closed form: R, the ridge λ of the values, whether
    they have slopes, the scales of the features. docs/learning.md has the formulas.

    Args:
        centers: "auto" (every point up to 1000, else the means of k-means), their number, or raw positions `(N, m)`.
        values: "constant", "affine" (`V_j + J_j(x̃ − c_j)`), or "auto": whichever leaves less error.
        solver: "ridge" (values solved for) or "smoother" (the targets themselves: Nadaraya–Watson).
        inverse_temperature: R in scaled features, or None. ridge: λ, or None.
        scaling: "standard" (zero mean, unit deviation), "none", or "auto": standard, then by relevance where that clearly helps.
        random_state: for k-means and for the sample on which relevance is judged; up to 600 points nothing is random.

    Attributes:
        head_: a `ScatteredHead` (an `nn.Module`) that takes raw features. partition_: its cells, in raw space.
        centers_, values_, value_slopes_: raw `(N, m)`, `(N, out)`, `(N, out, m)` or None.
        mean_, scale_: μ, S of `x̃ = S(x − μ)`. inverse_temperature_: R. ridge_: λ.
        sharpness_: κ = R h², h the root mean square distance between neighbouring centers in scaled features.
        effective_keys_: mean of `1/Σ_j w_j²` over the data. degrees_of_freedom_: the trace of the hat matrix.
        loo_predictions_: `(n,)` or `(n, out)`, each by the fit without that point. loo_error_: their mean squared error.
        loo_score_: their R². All three are nan for one sample, and flattered by what the scales have seen of y.

    >>> x = np.linspace(0, 6, 40)[:, None]
    >>> model = PartitionRegressor().fit(x, np.sin(x[:, 0]))
    >>> bool(np.abs(model.predict(x + 0.01) - np.sin(x[:, 0] + 0.01)).max() < 1e-2)
    True
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> PartitionRegressor:
        """Args: X `(n, m)`; y `(n,)` or `(n, out)`."""
        points, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        targets = np.asarray(y, dtype=np.float64)
        self._flat = targets.ndim == 1
        columns = targets.reshape(len(targets), -1)
        shape = () if self._flat else columns.shape[1:]
        left_out = self._fit_targets(points, columns, output_shape=shape, standardise=True)
        self.loo_predictions_ = left_out[:, 0] if self._flat else left_out
        self.loo_score_ = float(r2_score(columns, left_out)) if len(columns) > 1 else float("nan")
        return self

    def predict(self, X: ArrayLike) -> Array:
        """`(n,)`, or `(n, out)` if y had two axes."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._flat else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class PartitionClassifier(ClassifierMixin, _PartitionModel):
    """Classification by one softmax-attention head whose values are fitted to one-hot classes.

    The class is the largest output; `predict_proba` is the softmax of β times the outputs, β of least leave-one-out log-loss.
    Arguments and attributes are those of `PartitionRegressor`, but for `loo_predictions_`: outputs `(n, classes)`,
    `loo_error_`: their mean squared distance from one-hot, `loo_score_`: their accuracy.

    Attributes:
        classes_: the labels, sorted.
        proba_sharpness_: β.

    >>> x = np.array([[0.0], [0.1], [0.9], [1.0]])
    >>> PartitionClassifier().fit(x, ["no", "no", "yes", "yes"]).predict([[0.2], [0.8]]).tolist()
    ['no', 'yes']
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> PartitionClassifier:
        """Args: X `(n, m)`; y `(n,)`, labels of any kind."""
        points, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        one_hot = np.eye(len(self.classes_))[index]
        left_out = self._fit_targets(points, one_hot, output_shape=(len(self.classes_),), standardise=False)
        self.loo_predictions_ = left_out
        self.loo_score_ = float((left_out.argmax(axis=1) == index).mean()) if len(index) > 1 else float("nan")
        self.proba_sharpness_ = _calibrated(left_out, index)
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        """`(n, classes)`, positive, rows that sum to 1, largest where the head's output is."""
        outputs = self._outputs(X)
        out: Array = softmax(self.proba_sharpness_ * outputs, axis=1)
        return out

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """`(n,)` labels."""
        outputs = self._outputs(X)
        out: NDArray[Any] = self.classes_[outputs.argmax(axis=1)]
        return out


def _calibrated(left_out: Array, index: NDArray[np.int64]) -> float:
    """β between e⁻² and e⁵ that minimises `−Σ_i log softmax(β·left_out_i)[y_i] + log(1 + e^{βg})`; 1 if nothing was left out.

    The last term is one imagined miss by the mean margin g: without it β would be infinite for classes that n points separate.
    """
    if left_out.shape[1] < 2 or not np.isfinite(left_out).all():
        return 1.0
    rows = np.arange(len(index))
    margin = float(np.diff(np.partition(left_out, -2, axis=1)[:, -2:], axis=1).mean())

    def loss(log_beta: float) -> float:
        beta = np.exp(log_beta)
        return float(np.logaddexp(0.0, beta * margin) - log_softmax(beta * left_out, axis=1)[rows, index].sum())

    return float(np.exp(minimize_scalar(loss, bounds=(-2.0, 5.0), method="bounded").x))
