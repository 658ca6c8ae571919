/**
 * Curves that a lesson draws beside f and the head, in one dimension. `state.overlay` names one: {name, value}.
 *
 *     overlayCurves(overlay, {f, box})   [{label, f: x => y}, …]
 *
 * chebyshev:n  the polynomial of degree n − 1 that interpolates f at n Chebyshev points of the box
 * descent:k    w·(1, x) after k steps of gradient descent on the prompt, each step one attention layer; and exact descent
 */

/** @typedef {{label: string, f: (x: number) => number}} Curve */

/** Values at the Chebyshev points of the first kind, evaluated by the barycentric formula. @returns {(x: number) => number} */
export function chebyshev(f, box, n) {
  const middle = (box.lo[0] + box.hi[0]) / 2, radius = (box.hi[0] - box.lo[0]) / 2;
  const angles = Array.from({ length: n }, (_, k) => ((2 * k + 1) * Math.PI) / (2 * n));
  const points = angles.map((t) => middle + radius * Math.cos(t));
  const values = points.map((x) => f([x]));
  const weights = angles.map((t, k) => (k % 2 ? -1 : 1) * Math.sin(t));
  return (x) => {
    let above = 0, below = 0;
    for (let k = 0; k < n; k += 1) {
      const apart = x - points[k];
      if (apart === 0) return values[k];
      above += (weights[k] / apart) * values[k];
      below += weights[k] / apart;
    }
    return above / below;
  };
}

/** The examples (x_i, y_i) of the lesson on gradient descent: points of the line 0.3 + 0.8x. */
export const PROMPT = [-0.9, -0.7, -0.35, -0.1, 0.2, 0.45, 0.65, 0.95].map((x) => [x, Number((0.3 + 0.8 * x).toPrecision(6))]);
export const EPSILON = 0.05;
export const STEP_SIZE = 1;

const residuals = (w) => PROMPT.map(([x, y]) => w[0] + w[1] * x - y);
const features = PROMPT.map(([x]) => [1, x]);

/** (1/n) Σ r_i (1, x_i): the gradient of the mean of r²/2. */
function gradient(w) {
  const r = residuals(w);
  return [0, 1].map((c) => features.reduce((total, x, i) => total + r[i] * x[c], 0) / features.length);
}

/** One head over the examples and their mirror images, scores ±ε r_i and values ±x_i, divided by ε. */
function attended(w) {
  const scores = residuals(w).flatMap((r) => [EPSILON * r, -EPSILON * r]);
  const values = features.flatMap((x) => [x, x.map((c) => -c)]);
  const best = Math.max(...scores);
  const weights = scores.map((s) => Math.exp(s - best));
  const mass = weights.reduce((a, b) => a + b);
  return [0, 1].map((c) => weights.reduce((total, weight, i) => total + weight * values[i][c], 0) / mass / EPSILON);
}

/** w after so many steps from w = 0; `how` is "attention" or "exact". */
export function descent(steps, how) {
  let w = [0, 0];
  for (let k = 0; k < steps; k += 1) {
    const g = how === "exact" ? gradient(w) : attended(w);
    w = w.map((c, i) => c - STEP_SIZE * g[i]);
  }
  return w;
}

/** ε²[mean(|r|³|x|)/6 + |g| mean(r²)/2] cosh(ε max|r|): the most by which attention misses the gradient at w. */
export function gradientBound(w) {
  const r = residuals(w).map(Math.abs);
  const mean = (numbers) => numbers.reduce((a, b) => a + b) / numbers.length;
  const cubes = mean(r.map((s, i) => s ** 3 * Math.hypot(...features[i])));
  const g = Math.hypot(...gradient(w));
  return EPSILON ** 2 * (cubes / 6 + (g * mean(r.map((s) => s * s))) / 2) * Math.cosh(EPSILON * Math.max(...r));
}

/** How far the gradient by attention is from the exact one at w. */
export function gradientError(w) {
  const [a, g] = [attended(w), gradient(w)];
  return Math.hypot(a[0] - g[0], a[1] - g[1]);
}

const MAKERS = {
  chebyshev: (n, { f, box }) => [{ label: `Chebyshev, n = ${n}`, f: chebyshev(f, box, Math.min(Math.max(Math.round(n), 1), 64)) }],
  descent: (steps) => {
    const w = descent(Math.min(Math.max(Math.round(steps), 0), 1000), "attention");
    return [{ label: `after ${steps} layers`, f: (x) => w[0] + w[1] * x }];
  },
};

/** @param {{name: string, value: number}|null} overlay @returns {Curve[]} */
export function overlayCurves(overlay, { f, box }) {
  const make = overlay && Object.hasOwn(MAKERS, overlay.name) ? MAKERS[overlay.name] : null;
  return make && f && box.lo.length === 1 ? make(overlay.value, { f, box }) : [];
}
