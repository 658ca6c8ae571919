"""Exit codes of the command line."""

__all__ = ["NOTHING_CLAIMED", "REFUSED", "USAGE_ERROR"]

REFUSED = 1  # partita refuses, or what was asked about is not true
NOTHING_CLAIMED = 2  # `partita attack` of a head whose error is only an estimate
USAGE_ERROR = 64
