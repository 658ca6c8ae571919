"""Functions of many variables whose structure is in their formula: sums, compositions, and six functions of engineering.

The experiment on heads and layers, benchmarks/structure.py and the tests share them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from partita.geometry import Box

__all__ = ["KNOWN_FUNCTIONS", "KnownFunction", "bell_of", "norm_wave_of", "sines_of", "unequal_sines_of"]


@dataclass(frozen=True)
class KnownFunction:
    """A function of the literature on computer experiments, with its usual domain.

    Attributes:
        name: as it is usually called.
        expression: in x0, x1, …, in the order of `variables`.
        variables: what the inputs are called in the literature.
        lo: the lower ends of the box.
        hi: the upper ends.
        least: the smallest value on the box, found by a search from the best of 100,000 points, corners among them.
        largest: the largest value, found in the same way.
    """

    name: str
    expression: str
    variables: tuple[str, ...]
    lo: tuple[float, ...]
    hi: tuple[float, ...]
    least: float
    largest: float

    @property
    def box(self) -> Box:
        return Box(list(self.lo), list(self.hi))

    @property
    def span(self) -> float:
        """The largest value less the smallest."""
        return self.largest - self.least


def sines_of(count: int) -> str:
    """`Σ_{i<count} sin(3x_i)`: equal terms of one variable each."""
    return " + ".join(f"sin(3*x{i})" for i in range(count))


def unequal_sines_of(count: int) -> str:
    """`Σ_{i<count} sin((1 + i/50)x_i + i/7)`: terms of one variable that differ by an affine change of it."""
    return " + ".join(f"sin((1+{i}/50)*x{i}+{i}/7)" for i in range(count))


def bell_of(count: int) -> str:
    """`exp(−Σ_{i<count} x_i²)`: a function of one sum."""
    return f"exp(-({_squares(count)}))"


def norm_wave_of(count: int) -> str:
    """`sin(|x|)`, |x| the Euclidean norm."""
    return f"sin(sqrt({_squares(count)}))"


def _squares(count: int) -> str:
    return " + ".join(f"x{i}^2" for i in range(count))


_TURN = 2 * math.pi
_PISTON_A = "(x4*x1 + 19.62*x0 - x3*x2/x1)"
_PISTON_V = f"(x1/(2*x3)*(sqrt({_PISTON_A}^2 + 4*x3*x4*x2/x6*x5) - {_PISTON_A}))"
_OTL_GAIN = "(x5*(x4 + 9))"
_LOG_RADII = "log(x1/x0)"


def _arm(function: str) -> str:
    """One coordinate of the end of the arm: θ are x0, …, x3, the lengths x4, …, x7."""
    angles = [" + ".join(f"x{j}" for j in range(i + 1)) for i in range(4)]
    return " + ".join(f"x{4 + i}*{function}({angle})" for i, angle in enumerate(angles))


KNOWN_FUNCTIONS: dict[str, KnownFunction] = {
    f.name: f
    for f in (
        KnownFunction(
            "Ishigami",
            "sin(x0) + 7*sin(x1)^2 + 0.1*x2^4*sin(x0)",
            ("x1", "x2", "x3"),
            (-math.pi,) * 3,
            (math.pi,) * 3,
            -10.7409091,
            17.7409091,
        ),
        KnownFunction(
            "borehole",
            f"2*pi*x2*(x3 - x5)/({_LOG_RADII}*(1 + 2*x6*x2/({_LOG_RADII}*x0^2*x7) + x2/x4))",
            ("r_w", "r", "T_u", "H_u", "T_l", "H_l", "L", "K_w"),
            (0.05, 100.0, 63070.0, 990.0, 63.1, 700.0, 1120.0, 9855.0),
            (0.15, 50000.0, 115600.0, 1110.0, 116.0, 820.0, 1680.0, 12045.0),
            7.819676329,
            309.5755877,
        ),
        KnownFunction(
            "OTL circuit",
            f"(12*x1/(x0 + x1) + 0.74)*{_OTL_GAIN}/({_OTL_GAIN} + x2) + 11.35*x2/({_OTL_GAIN} + x2)"
            f" + 0.74*x2*{_OTL_GAIN}/(({_OTL_GAIN} + x2)*x3)",
            ("R_b1", "R_b2", "R_f", "R_c1", "R_c2", "beta"),
            (50.0, 25.0, 0.5, 1.2, 0.25, 50.0),
            (150.0, 70.0, 3.0, 2.5, 1.2, 300.0),
            2.603714846,
            9.601342642,
        ),
        KnownFunction(
            "piston",
            f"2*pi*sqrt(x0/(x3 + x1^2*x4*x2/x6*x5/{_PISTON_V}^2))",
            ("M", "S", "V_0", "k", "P_0", "T_a", "T_0"),
            (30.0, 0.005, 0.002, 1000.0, 90000.0, 290.0, 340.0),
            (60.0, 0.020, 0.010, 5000.0, 110000.0, 296.0, 360.0),
            0.1642288492,
            1.199011223,
        ),
        KnownFunction(
            "wing weight",
            "0.036*x0^0.758*x1^0.0035*(x2/cos(x3*pi/180)^2)^0.6*x4^0.006*x5^0.04*(100*x6/cos(x3*pi/180))^-0.3"
            "*(x7*x8)^0.49 + x0*x9",
            ("S_w", "W_fw", "A", "Lambda", "q", "lambda", "t_c", "N_z", "W_dg", "W_p"),
            (150.0, 220.0, 6.0, -10.0, 16.0, 0.5, 0.08, 2.5, 1700.0, 0.025),
            (200.0, 300.0, 10.0, 10.0, 45.0, 1.0, 0.18, 6.0, 2500.0, 0.08),
            123.2536717,
            517.6650489,
        ),
        KnownFunction(
            "robot arm",
            f"sqrt(({_arm('cos')})^2 + ({_arm('sin')})^2)",
            ("theta_1", "theta_2", "theta_3", "theta_4", "L_1", "L_2", "L_3", "L_4"),
            (0.0,) * 8,
            (_TURN,) * 4 + (1.0,) * 4,
            0.0,
            4.0,
        ),
    )
}
