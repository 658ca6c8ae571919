"""Exact forms in which products of positive numbers are sums: a·b/c = exp(log a + log b − log c).

An error in a factor reaches the product multiplied by all the other factors, and an error in a divisor b is divided by b². With
logarithms it arrives as a relative error, whatever the sizes are, and factors of similar size share one head for the logarithm.

For forms a, b that are known to be positive, and rational numbers q, the rules beside those of `affine_forms` are

    a·b, 1/a, a^n, √a    exp of log a + log b, −log a, n log a, ½ log a; a power of a sum only where it is a factor
    log(a + b)           log a + log(1 + exp(log b − log a))
    log(c·a)             log c + log a; log(exp(u)) = u, and likewise for the powers below
    exp(q log a)         a, 1/a, a^q and √a for q = 1, −1, any other integer, ½
    exp(n log c + u)     c^n · exp(u) for a number c > 0 and an integer n
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from partita.functions.affine_forms import Form, Interner, Pending

__all__ = ["Logarithms"]

_ZERO, _HALF, _ONE = Fraction(0), Fraction(1, 2), Fraction(1)
_DEEPEST = 64  # nested sums that the logarithm of a form is taken into
_MOST_POWER = 64  # exponents of numbers that are multiplied out


class Logarithms(Interner):
    """Atoms, with products of positive forms written as exp of a sum of logarithms.

    Attributes:
        positive: forms that are known to be positive, each divided by its scale.

    >>> interner = Logarithms()
    >>> x, y = interner.input(0), interner.input(1)
    >>> for form in (x, y):
    ...     interner.assume_positive(form)
    >>> product = interner.product([x.scaled(Fraction(2)), y])
    >>> interner.atoms[next(iter(product.terms))].operation, interner.product([product, interner.recip(y)]) == x.scaled(Fraction(2))
    ('exp', True)
    """

    def __init__(self) -> None:
        super().__init__()
        self.positive: set[Form] = set()
        self._signs: dict[int, tuple[bool, int]] = {}  # of atoms: whether positive, and how many forms were known to be
        self._logs: dict[Form, Form] = {}
        self._depth = 0  # of the logarithms that are being taken apart

    def assume_positive(self, form: Form) -> None:
        """Take it as known that a form is positive."""
        if form.terms:
            self.positive.add(_unit(form))

    def is_positive(self, form: Form) -> bool:
        """Whether a form is known to be positive: by assumption, or as a sum of positive numbers."""
        if form.terms and _unit(form) in self.positive:
            return True
        if form.constant < 0 or any(c < 0 for c in form.terms.values()):
            return False
        return (form.constant > 0 or bool(form.terms)) and all(map(self._is_positive_atom, form.terms))

    def _is_positive_atom(self, k: int) -> bool:
        atom = self.atoms[k]
        if atom.operation == "exp" or Form.of(k) in self.positive:
            return True
        if atom.operation not in ("recip", "sqrt", "pow"):
            return False
        found, known = self._signs.get(k, (False, -1))
        if not found and known < len(self.positive):  # more may be known by now
            found = self.is_positive(atom.arguments[0])
            self._signs[k] = found, len(self.positive)
        return found

    def apply(self, operation: str, arguments: Sequence[Form], parameters: tuple[int | float, ...] = ()) -> Form:
        if operation == "exp":
            return self._exp(arguments[0])
        if operation == "log" and arguments[0].terms and (self.defined or self.is_positive(arguments[0])):
            self.assume_positive(arguments[0])  # as it is wherever its logarithm is defined
            return self._log(arguments[0])
        if operation == "sqrt" and self._is_factor(arguments[0]):
            return self._exp(self._log(arguments[0]).scaled(_HALF))
        return super().apply(operation, arguments, parameters)

    def recip(self, form: Form) -> Form:
        return self._exp(self._log(form).scaled(-_ONE)) if self._is_factor(form) else super().recip(form)

    def power(self, form: Form, exponent: int) -> Form:
        if exponent and self._is_factor(form):
            return self._exp(self._log(form).scaled(Fraction(exponent)))
        return super().power(form, exponent)

    def _is_factor(self, form: Form) -> bool:
        """Whether a form is positive and no sum: a power of a sum is taken apart only where it is multiplied."""
        return bool(form.terms) and self.is_positive(form) and len(self._positive_parts(form)) == 1

    def finished(self, pending: Pending) -> Form:
        if pending.operation != "product" or not pending.factor:
            return super().finished(pending)
        logarithms, rest = list[tuple[Fraction, Form]](), Pending("product", pending.factor)
        for form, spelled in zip(pending.parts, pending.spelled):
            sign = next((s for s in (_ONE, -_ONE) if self.is_positive(form.scaled(s))), None)
            if sign is None:
                rest.parts.append(form)
                rest.spelled.append(spelled)
            else:
                rest.factor *= sign
                logarithms.append((_ONE, self._log(form.scaled(sign))))
        if logarithms:
            self.multiply(rest, self._exp(Form.total(logarithms)))
        return super().finished(rest)

    def _log(self, form: Form) -> Form:
        """The logarithm of a positive form that is no number; each is taken apart once, so that long chains take linear time."""
        if form in self._logs:
            return self._logs[form]
        if self._depth == _DEEPEST:
            return self._log_of_number(_scale(form)).plus(Form.of(self.number("log", (_unit(form),), ())))
        self._depth += 1
        try:
            self._logs[form] = self._taken_apart(form)
        finally:
            self._depth -= 1
        return self._logs[form]

    def _taken_apart(self, form: Form) -> Form:
        if len(parts := self._positive_parts(form)) > 1:
            return self._log_of_sum(parts)
        constant, unit = self._log_of_number(_scale(form)), _unit(form)
        atom = None if unit.single is None else self.atoms[unit.single]
        if atom is not None and atom.operation == "exp":
            return constant.plus(atom.arguments[0])
        if atom is not None and atom.operation in _EXPONENTS and self.is_positive(atom.arguments[0]):
            exponent, base = _EXPONENTS[atom.operation] or Fraction(atom.parameters[0]), atom.arguments[0]
            return constant.plus(self._log(base) if base.terms else self._log_of_number(base.constant), exponent)
        return constant.plus(Form.of(self.number("log", (unit,), ())))

    def _positive_parts(self, form: Form) -> list[Form]:
        """Positive parts of a sum: each atom that is no input, and the rest. The form itself if not all of these are positive."""
        atoms = [k for k in form.terms if self.atoms[k].operation != "input"]
        rest = Form(form.constant, {k: c for k, c in form.terms.items() if k not in atoms})
        parts = [rest] if rest.terms or rest.constant else []
        parts += [Form(_ZERO, {k: form.terms[k]}) for k in sorted(atoms)]
        return parts if all(map(self.is_positive, parts)) else [form]

    def _log_of_sum(self, parts: Sequence[Form]) -> Form:
        """`log(a + b) = log a + log(1 + exp(log b − log a))`, whose slopes along log a and log b are between 0 and 1."""
        logs = [self._log(part) if part.terms else self._log_of_number(part.constant) for part in parts]
        total = logs[0]
        for other in logs[1:]:
            ratio = self._exp(other.plus(total, -_ONE))
            total = total.plus(Form.of(self.number("log", (ratio.plus(Form(_ONE)),), ())))
        return total

    def _log_of_number(self, number: Fraction) -> Form:
        if number < 1:
            return self._log_of_number(1 / number).scaled(-_ONE)
        return Form() if number == 1 else Form.of(self.number("log", (Form(number),), ()))

    def _exp(self, form: Form) -> Form:
        """exp of a form."""
        factor, terms = _ONE, dict(form.terms)
        for k, c in form.terms.items():
            atom = self.atoms[k]
            if atom.operation == "log" and not atom.arguments[0].terms and c.denominator == 1 and abs(c) <= _MOST_POWER:
                factor *= atom.arguments[0].constant ** int(c)
                del terms[k]
        if not terms and not form.constant:
            return Form(factor)
        return self._power_of(Form(form.constant, terms)).scaled(factor)

    def _power_of(self, form: Form) -> Form:
        if len(form.terms) == 1 and not form.constant:
            ((k, exponent),) = form.terms.items()
            base = self.atoms[k].arguments[0] if self.atoms[k].operation == "log" else Form()
            if base.terms and self.is_positive(base):
                if exponent == 1:
                    return base
                for name, known in _EXPONENTS.items():
                    if known == exponent:
                        return Form.of(self.number(name, (base,), ()))
                if exponent.denominator == 1:
                    return Form.of(self.number("pow", (base,), (int(exponent),)))
        return Form.of(self.number("exp", (form,), ()))


_EXPONENTS = {"recip": -_ONE, "sqrt": _HALF, "pow": Fraction(0)}  # 0 where the exponent is a parameter


def _scale(form: Form) -> Fraction:
    """The size that most coefficients have; of equally frequent ones, that of the atom with the smallest number."""
    sizes = Counter(abs(form.terms[k]) for k in sorted(form.terms))
    return sizes.most_common(1)[0][0]


def _unit(form: Form) -> Form:
    """The form divided by its scale: the same for all positive multiples."""
    return form.scaled(1 / _scale(form))
