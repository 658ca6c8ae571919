"""From a slow simulator to a small head in ONNX and C: the voltage of a battery cell after a pulse, as attention.

One call of the simulator solves a differential equation: lithium diffuses in the particles of both electrodes while the
cell heats up. It takes tens of milliseconds, so processes share the calls, and a checkpoint keeps every answer: if you stop
this program and start it again, it goes on where it was. The parameters are made up, but typical of a small cell.

Run it with `python examples/slow_battery.py --out battery-output`; `--quick` takes a coarse tolerance.
"""

import argparse
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import onnxruntime
from scipy.integrate import solve_ivp

import partita as pa

SHELLS = 40  # in the particle of each electrode
CAPACITY = 3.0  # ampere hours
PULSE = 120.0  # seconds
GAS, FARADAY, REFERENCE = 8.314, 96485.0, 298.15
# state of charge, discharge current in amperes (negative: charge), ambient temperature in °C
BOX = pa.Box([0.2, -3.0, 5.0], [0.9, 6.0, 45.0])
DIFFUSION = ((1.2e-3, 35e3), (2.5e-3, 28e3))  # 1/s at 25 °C in units of radius²; J/mol: negative and positive electrode
KINETICS = ((9.0, 40e3), (7.0, 32e3))  # exchange currents in amperes, J/mol
RESISTANCE, HEAT_CAPACITY, COOLING = 0.012, 42.0, 0.12  # ohm, J/K, W/K


def arrhenius(value_and_energy: tuple[float, float], kelvin: float) -> float:
    """A rate at a temperature."""
    value, energy = value_and_energy
    return value * float(np.exp(energy / GAS * (1 / REFERENCE - 1 / kelvin)))


def graphite(x: float) -> float:
    """The potential of the negative electrode, x the share of its sites that are filled."""
    return 0.12 + 0.6 * float(np.exp(-18 * x)) - 0.05 * float(np.tanh((x - 0.55) / 0.12)) - 0.03 * x


def oxide(y: float) -> float:
    """The potential of the positive electrode."""
    return 4.32 - 0.75 * y + 0.06 * float(np.tanh((0.62 - y) / 0.1)) - 0.04 * float(np.exp(25 * (y - 0.97)))


def diffusion_in_a_sphere() -> tuple[np.ndarray, float]:
    """Rates of exchange between shells of equal thickness, and what a flux of 1 through the surface adds to the outermost."""
    edges = np.linspace(0, 1, SHELLS + 1)
    volumes = np.diff(edges**3) / 3
    between = edges[1:-1] ** 2 * SHELLS
    matrix = np.zeros((SHELLS, SHELLS))
    for i, rate in enumerate(between):
        matrix[[i, i, i + 1, i + 1], [i, i + 1, i, i + 1]] += np.array([-rate, rate, rate, -rate])
    return matrix / volumes[:, None], 1 / volumes[-1]


EXCHANGE, SURFACE = diffusion_in_a_sphere()


def voltage_now(state: np.ndarray, current: float) -> tuple[float, float]:
    """The voltage at the terminals, and the voltage that the cell would have at rest."""
    kelvin = state[-1]
    x, y = (float(np.clip(c, 0.004, 0.996)) for c in (state[SHELLS - 1], state[2 * SHELLS - 1]))
    rest, thermal = oxide(y) - graphite(x), 2 * GAS * kelvin / FARADAY
    lost = RESISTANCE * current
    for filled, kinetics in ((x, KINETICS[0]), (y, KINETICS[1])):
        lost += thermal * float(
            np.arcsinh(current / (2 * arrhenius(kinetics, kelvin) * np.sqrt(filled * (1 - filled))))
        )
    return rest - lost, rest


def change(_: float, state: np.ndarray, current: float, ambient: float) -> np.ndarray:
    """The time derivative of the contents of all shells and of the temperature."""
    kelvin = state[-1]
    voltage, rest = voltage_now(state, current)
    moved = current / (3600 * CAPACITY) / 3  # per second, in units of the contents of a particle of radius 1
    inside = []
    for k, sign in ((0, -1.0), (1, 0.62)):  # the positive electrode has more sites
        contents = state[k * SHELLS : (k + 1) * SHELLS]
        rate = arrhenius(DIFFUSION[k], kelvin) * EXCHANGE @ contents
        rate[-1] += sign * moved * SURFACE
        inside.append(rate)
    heat = current * (rest - voltage) - COOLING * (kelvin - ambient)
    return np.concatenate([*inside, [heat / HEAT_CAPACITY]])


def voltage(z: np.ndarray) -> float:
    """The voltage after a pulse, for one state of charge, current and ambient temperature."""
    charge, current, ambient = float(z[0]), float(z[1]), float(z[2]) + 273.15
    start = np.concatenate([np.full(SHELLS, 0.05 + 0.85 * charge), np.full(SHELLS, 0.95 - 0.6 * charge), [ambient]])
    found = solve_ivp(change, (0, PULSE), start, "BDF", args=(current, ambient), rtol=1e-10, atol=1e-12)
    return voltage_now(found.y[:, -1], current)[0]


class Shown:
    """Prints what is being done, and how often the simulator was called, every few seconds."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        if time.monotonic() - self.last > 5:
            self.last = time.monotonic()
            print(f"  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("battery-output"))
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that call the simulator; 0 for this one alone"
    )
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    tolerance, samples = (0.05, 4) if given.quick else (0.003, 128)  # volts, points
    outside = {"executor": given.workers or None, "checkpoint": given.out / "answers"}

    voltage(np.array([0.5, 1.0, 25.0]))  # scipy loads what it needs
    started = time.perf_counter()
    value = voltage(np.array([0.55, 3.0, 25.0]))
    print(f"one call of the simulator: {value:.4f} V, in {1000 * (time.perf_counter() - started):.0f} ms")

    started = time.perf_counter()
    c = pa.compile(voltage, BOX, tolerance=tolerance, vectorize=True, retries=1, progress=Shown(), **outside)
    print(f"{c.evaluations} calls in {time.perf_counter() - started:.0f} s, shared by {given.workers or 1} processes")
    print(c)
    print(c.explain().splitlines()[0])

    started = time.perf_counter()
    found = pa.attack(c, samples=samples, restarts=0, **outside)
    print(f"attack: {1000 * found.error:.2f} mV is the largest error at {found.samples:,} more points")
    print(f"  found in {time.perf_counter() - started:.0f} s, at ({', '.join(f'{x:.3g}' for x in found.point)})")

    c.save(given.out / "head", overwrite=True)
    loaded = pa.load(given.out / "head").with_function(voltage, vectorize=True)
    point = np.array([0.55, 3.0, 25.0])
    print(f"loaded again: {loaded(point):.4f} V, off by {1000 * loaded.errors_at(point[None])[0]:.2f} mV")

    session = onnxruntime.InferenceSession(c.export_onnx(given.out / "battery.onnx"))
    points = BOX.sample(10_000, np.random.default_rng(0))
    started = time.perf_counter()
    values = session.run(None, {"z": points})[0]
    seconds = time.perf_counter() - started
    print(
        f"ONNX: {len(points):,} points in {1000 * seconds:.0f} ms, {np.abs(values - c(points)).max():.0e} V from the head"
    )

    source = c.export_c(given.out / "battery.c", name="battery")
    print(f"C: {len(source.read_text().splitlines())} lines")
    if compiler := shutil.which("cc"):
        program = given.out / "battery"
        subprocess.run([compiler, "-O2", "-DBATTERY_SELFTEST", source, "-o", program], check=True)
        print(f"  {subprocess.run([program.resolve()], capture_output=True, text=True).stdout.strip()}")


if __name__ == "__main__":
    main()
