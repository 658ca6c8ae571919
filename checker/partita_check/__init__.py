"""Checks that a saved head is as close to its function as its certificate says, without trusting the certificate.

Standard library and python-flint only; nothing here is shared with the program that wrote the files.
"""

__all__ = ["__version__"]
__version__ = "0.3.0"
