"""For engineers: turn an expensive function on a box into a certified surrogate and an ONNX file.

The "simulator" below is a black box. Only a Lipschitz constant is declared, and the certificate lists it as an
assumption. Written as an expression, the same function needs a hundredth of the keys for a thousandth of the error, and
is proved without assumptions.
"""

import argparse
from pathlib import Path

import numpy as np

import partita as pa


def simulator(z: np.ndarray) -> np.ndarray:
    """Settling time and overshoot of a damped oscillator, as functions of damping and frequency (two outputs)."""
    damping, frequency = z[:, 0], z[:, 1]
    settling = 4 / (damping * frequency)
    overshoot = np.exp(-np.pi * damping / np.sqrt(1 - damping**2))
    return np.stack([settling, overshoot], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("engineer-output"))
    out = parser.parse_args().out
    box = pa.Box([0.3, 1.0], [0.7, 2.0])  # damping ratio, natural frequency

    plan = pa.plan(simulator, box, tolerance=0.25, lipschitz=47.0)
    print("planned, before anything is built:", plan.why[0])
    surrogate = pa.compile(simulator, box, tolerance=0.25, lipschitz=47.0)
    print(surrogate.certificate.explain())

    formula = "4/(x0*x1), exp(-3.141592653589793*x0/sqrt(1 - x0^2))"
    smaller = pa.compile(formula, box, tolerance=2.5e-4)
    print(f"as an expression: {smaller}\n{smaller.report()}")

    folder = surrogate.save(out / "surrogate", overwrite=True)
    onnx = surrogate.export_onnx(out / "surrogate.onnx")
    print(f"saved in {folder}/ and {onnx}")

    try:
        surrogate(np.array([[0.9, 1.5]]))
    except pa.PartitaError as error:
        print("an input outside the certified box:", error)


if __name__ == "__main__":
    main()
