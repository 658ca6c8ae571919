"""The exceptions of partita. A message names the object, what was found, what was expected, and what to do next."""

import errno
from typing import Self

__all__ = [
    "AlreadyExistsError",
    "AnotherFunctionError",
    "BudgetSpentError",
    "CheckpointError",
    "CurvatureContradictedError",
    "DataFileError",
    "DomainError",
    "EvaluationsSpentError",
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
    "NotSendableError",
    "NotTraceableError",
    "NotVectorizedError",
    "NotWrittenError",
    "NothingKnownError",
    "OutsideDomainError",
    "PartitaError",
    "ProofRefutedError",
    "RanksDisagreeError",
    "ShapeError",
    "SizeError",
    "TableError",
    "TamperedFileError",
    "TargetFailedError",
    "ToleranceError",
    "ToleranceMissedWarning",
    "TruncatedFileError",
    "UnsupportedError",
    "WorkersLostError",
]


class PartitaError(Exception):
    """Base of every error that partita raises on purpose.

    The message is "reason. hint", or the reason alone if there is no hint.

    Args:
        reason: what is wrong. Reports show it as a row.
        hint: what to do about it. May be empty.

    >>> import partita as pa
    >>> print(pa.PartitaError("tolerance is -1", "Use a number > 0."))
    tolerance is -1. Use a number > 0.
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


class _TypedTextError(PartitaError):
    """An error in text that somebody typed.

    Attributes:
        span: the place in the text, from the first character to after the last one; None where it is not known.
        problem: what is wrong, without the text and the mark below the place; empty where the message has no mark.
    """

    span: tuple[int, int] | None = None
    problem: str = ""

    def at(self, start: int, end: int, problem: str = "") -> Self:
        """The same error with its place in the text.

        Args:
            start: the first character.
            end: the character after the last one.
            problem: what is wrong, if the message also shows the text.
        """
        self.span, self.problem = (start, end), problem
        return self


class DomainError(_TypedTextError):
    """An invalid domain or number: lo ≥ hi, infinite sides, no points, a negative fill distance."""


class ShapeError(PartitaError):
    """An array whose shape is not the expected one."""


class OutsideDomainError(PartitaError):
    """An input outside the domain that the certificate covers."""


class ToleranceError(PartitaError):
    """A tolerance that is not positive, or smaller than the dtype or the available knowledge of f allows."""


class ToleranceMissedWarning(UserWarning):
    """A head whose error is above the tolerance, returned because time or evaluations ran out before a better one was found."""


class SizeError(PartitaError):
    """Something too large for the memory limit. Raised before memory is allocated."""


class UnsupportedError(PartitaError):
    """An invalid option, or a combination of options that no method supports."""


class NotContinuousError(UnsupportedError):
    """A function that may jump or be infinitely steep, with a norm that requires continuity."""


class NothingKnownError(PartitaError):
    """A black box without any declared property, so nothing can be proved."""


class TargetFailedError(PartitaError):
    """The function raised, or returned something that is not an array of numbers."""


class NonFiniteValueError(PartitaError):
    """NaN or infinity, in an input or returned by the function."""


class NotVectorizedError(PartitaError):
    """A function whose value at a point depends on the other points of the batch."""


class NotTraceableError(UnsupportedError):
    """A torch function that cannot be traced into an expression, or whose trace computes something else."""


class NotDeterministicError(PartitaError):
    """A function that returned two different values at the same point."""


class MutatedInputError(PartitaError):
    """A function that writes into its input array."""


class LipschitzContradictedError(PartitaError):
    """The function contradicts what was declared about it: it moves faster than its modulus allows, or has a larger tail."""


class ProofRefutedError(PartitaError):
    """A finished head whose error exceeds its proved bound at some point: a bug in partita."""


class BudgetSpentError(PartitaError):
    """Work that was stopped because its time budget is spent."""


class CheckpointError(PartitaError):
    """A checkpoint that cannot be used: its folder or a file in it is damaged or locked, or a function has no known content."""


class WorkersLostError(PartitaError):
    """Processes that stopped working: an executor whose workers died or whose scheduler is gone, or ranks of a process group."""


class RanksDisagreeError(PartitaError):
    """Processes of a group that were given different heads or inputs, or that made different calls."""


class NotSendableError(UnsupportedError):
    """A function or a value that an executor cannot send to other processes."""


class EvaluationsSpentError(BudgetSpentError):
    """Work that was stopped because the function may not be evaluated more often."""


class AnotherFunctionError(PartitaError):
    """A function given to a loaded head that is not the one the head was compiled from."""


class CurvatureContradictedError(PartitaError):
    """The function bends more between three points on a line than its declared second derivatives allow."""


class ExpressionError(_TypedTextError):
    """Text that is not a valid expression."""


class ExpressionLimitError(ExpressionError):
    """An expression beyond the limits on length, nodes, depth or exponents."""


class AlreadyExistsError(PartitaError):
    """A file or folder that would be overwritten."""


class TableError(PartitaError):
    """A table of samples that cannot be used: missing values, text, constant columns, too few rows, columns that do not exist."""


class NotWrittenError(PartitaError):
    """A file that could not be written: the disk is full, or the folder does not allow it.

    Args:
        reason: what is wrong.
        hint: what to do about it.
    """

    @classmethod
    def of(cls, path: object, error: OSError) -> "NotWrittenError":
        """The error for what the operating system said.

        Args:
            path: the file.
            error: what was raised.
        """
        said = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return cls(
                f"{path} does not fit: {said}; nothing of it is left",
                "Free some space, use another disk, or a larger tolerance.",
            )
        return cls(f"{path} cannot be written: {said}; nothing of it is left", "Choose another folder.")


class DataFileError(PartitaError):
    """A data file that is missing, cut short, or has the wrong contents."""


class FormatError(PartitaError):
    """A file that does not follow docs/format.md."""


class TruncatedFileError(FormatError):
    """A file that is cut short, or a folder with a missing file."""


class TamperedFileError(FormatError):
    """A file whose contents do not match their recorded hash."""


class NewerVersionError(FormatError):
    """A file in a newer format than this version of partita reads."""


class MissingExtraError(PartitaError, ImportError):
    """An optional dependency that is not installed. The message names the command that installs it.

    Args:
        reason: what is wrong.
        hint: what to do about it.
    """

    @classmethod
    def of(cls, who: str, extra: str) -> "MissingExtraError":
        """The error for an extra that is not installed, with the command that fits how partita itself was installed.

        Args:
            who: what needs the extra, with its verb: "plots need".
            extra: its name in pyproject.toml.
        """
        return cls(f"{who} the extra {extra!r}, which is not installed", f"Run: {_install_command(extra)}")


def _install_command(extra: str) -> str:
    """The command that adds an extra to this installation: editable, from a folder, a file, a repository, or an index."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        installed = distribution("partita")
    except PackageNotFoundError:  # run from a folder of source files
        root = Path(__file__).parent.parent
        return (
            f'pip install -e "{root}[{extra}]"'
            if (root / "pyproject.toml").is_file()
            else f'pip install "partita[{extra}]"'
        )
    pip = "uv pip install" if (installed.read_text("INSTALLER") or "").strip() == "uv" else "pip install"
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if url.startswith("file:"):
        place = Path(url2pathname(urlsplit(url).path))
        if place.exists():
            return f'{pip} {"-e " if origin.get("dir_info", {}).get("editable") else ""}"{place}[{extra}]"'
        lines = [
            line.partition(";") for line in installed.requires or []
        ]  # the folder is gone: what the extra consists of
        names = [
            need.strip() for need, _, when in lines if f"extra=='{extra}'" in when.replace(" ", "").replace('"', "'")
        ]
        return f"{pip} " + " ".join(f'"{name}"' for name in names)
    if not url:
        return f'{pip} "partita[{extra}]"'
    version = origin.get("vcs_info")
    place_of = f"{version['vcs']}+{url}@{version['commit_id']}" if version else url
    return f'{pip} "partita[{extra}] @ {place_of}"'
