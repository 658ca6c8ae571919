"""What partita raises. Every message names the object, what was found, what was expected and what to do next."""

__all__ = [
    "AlreadyExistsError",
    "BudgetSpentError",
    "CurvatureContradictedError",
    "DataFileError",
    "DomainError",
    "ExpressionError",
    "ExpressionLimitError",
    "FormatError",
    "LipschitzContradictedError",
    "MissingExtraError",
    "MutatedInputError",
    "NewerVersionError",
    "NonFiniteValueError",
    "NotContinuousError",
    "NotDeterministicError",
    "NotTraceableError",
    "NotVectorizedError",
    "NothingKnownError",
    "OutsideDomainError",
    "PartitaError",
    "ProofRefutedError",
    "ShapeError",
    "SizeError",
    "TamperedFileError",
    "TargetFailedError",
    "ToleranceError",
    "TruncatedFileError",
    "UnsupportedError",
]


class PartitaError(Exception):
    """Base of everything that partita raises on purpose.

    Args:
        reason: what is wrong, as a row of a report shows it. hint: what to do about it; may be left out. The message is both.
    """

    def __str__(self) -> str:
        return ". ".join(str(part) for part in self.args if part)

    @property
    def reason(self) -> str:
        """What is wrong."""
        return str(self.args[0]) if self.args else ""

    @property
    def hint(self) -> str:
        """What to do about it."""
        return str(self.args[1]) if len(self.args) > 1 else ""


class DomainError(PartitaError):
    """A domain that is not one: lo ≥ hi, infinite sides, no points, a negative fill distance."""


class ShapeError(PartitaError):
    """A tensor whose shape does not fit where it was put."""


class OutsideDomainError(PartitaError):
    """An input outside the domain that the certificate speaks about."""


class ToleranceError(PartitaError):
    """A tolerance that is not positive, or that lies below what the dtype or the knowledge of f can reach."""


class SizeError(PartitaError):
    """Something that would not fit in memory: refused before anything is allocated."""


class UnsupportedError(PartitaError):
    """A combination of options that no construction covers."""


class NotContinuousError(UnsupportedError):
    """A function that may jump or be infinitely steep, asked for in a norm that does not forgive it."""


class NothingKnownError(PartitaError):
    """A black box of which nothing is declared, so that nothing can be proved."""


class TargetFailedError(PartitaError):
    """The target function raised, or returned something that is not an array of numbers."""


class NonFiniteValueError(PartitaError):
    """NaN or infinity, from the target function or in an input."""


class NotVectorizedError(PartitaError):
    """A target whose value at a point depends on the batch that the point sits in."""


class NotTraceableError(UnsupportedError):
    """A torch function that cannot be written as an expression graph, or whose graph says something else."""


class NotDeterministicError(PartitaError):
    """A target that gives two answers to one question."""


class MutatedInputError(PartitaError):
    """A target that writes into the array it is given."""


class LipschitzContradictedError(PartitaError):
    """Two points between which the target moves faster than its declared modulus of continuity allows."""


class ProofRefutedError(PartitaError):
    """A point at which a finished head errs by more than was proved: a bug in partita, not in what the caller declared."""


class BudgetSpentError(PartitaError):
    """Work that was stopped because the time allowed for it is over."""


class CurvatureContradictedError(PartitaError):
    """Three points on a line between which the target bends more than its declared second derivatives allow."""


class ExpressionError(PartitaError):
    """Text that is not an expression of the small language that partita reads."""


class ExpressionLimitError(ExpressionError):
    """An expression beyond the limits on length, nodes, depth or exponents."""


class AlreadyExistsError(PartitaError):
    """A folder that is in the way of what is to be written."""


class DataFileError(PartitaError):
    """A data file that is missing, cut short or not what its name says."""


class FormatError(PartitaError):
    """A file that is not what docs/format.md says."""


class TruncatedFileError(FormatError):
    """A file that ends too early, or a folder from which one is missing."""


class TamperedFileError(FormatError):
    """A file whose contents no longer match the hash recorded beside it."""


class NewerVersionError(FormatError):
    """A file written by a newer format than this version reads."""


class MissingExtraError(PartitaError, ImportError):
    """An optional dependency that is not installed."""
