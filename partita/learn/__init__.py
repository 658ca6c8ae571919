"""Data instead of functions: scikit-learn estimators whose model is one softmax-attention head over scattered centers."""

from partita.errors import MissingExtraError

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise MissingExtraError.of("partita.learn needs", "sklearn") from error

from partita.learn.estimators import PartitionClassifier, PartitionRegressor, load

__all__ = ["PartitionClassifier", "PartitionRegressor", "load"]
