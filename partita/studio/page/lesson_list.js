/**
 * The lessons: what they say and the states of the playground that they show. `lessons.js` draws them.
 *
 * A lesson is `{name, part, title, text: [two short paragraphs], formula, attempt, state, knobs?, figures?, chart?}`.
 * `state` is merged over the initial state. A knob is a slider: `values`, `read(state)` and `apply(value, state)`, a patch of
 * the state, so its position is in the address like everything else. `figures(view)` returns lines `{id, label, value}`,
 * computed from the head that is on the page; `chart(view)` returns one curve. `view` is
 * `{state, head, box, f, seen, curves}`: the head of head.js, f as a function of a point, the largest error seen, the overlaid
 * curves with their largest difference from f.
 *
 * tests/test_studio_lessons.py compares the figures with partita's.
 */
import { cellsOf, ErrorSearch, headOf } from "./head.js";
import { FITTED } from "./lesson_data.js";
import { NEXT_LINE, bars, formula, frac, max, root, row, sub, sum, sup, words } from "./mathml.js";
import { descent, gradientBound, gradientError, PROMPT } from "./overlays.js";

const WAVE = "sin(3*x)*cos(2*y)";
const SQUARE = "[-1,1]^2";
const INTERVAL = "[-1,1]";

/** A key of the state: center, value, slope, power. */
const key = (x, v = 0, g = x.map(() => 0), p = 0) => ({ x, p, v, g });
const keysAt = (...centers) => centers.map((center) => key(center));
const short = (number) => Number(number.toPrecision(6));

/** Centers of `count` equal cells of [-1, 1] with `ghosts` more beyond each end. */
export function row1d(count, ghosts = 0) {
  const centers = [];
  for (let k = -ghosts; k < count + ghosts; k += 1) centers.push(short(-1 + ((2 * k + 1) * 1) / count));
  return centers;
}

const grid2d = (count) => row1d(count).flatMap((y) => row1d(count).map((x) => key([x, y])));

const SEVEN = [[-0.72, -0.6], [0.05, -0.75], [0.7, -0.5], [-0.45, 0.15], [0.3, 0.05], [0.75, 0.55], [-0.2, 0.75]];

/** Lambert's W for t ≥ 0: the w with w e^w = t. */
export function lambert(t) {
  let w = Math.log1p(t);
  for (let k = 0; k < 30; k += 1) w -= (w * Math.exp(w) - t) / (Math.exp(w) * (1 + w));
  return w;
}

/** Scores s_j, up to a common function of the query: the exponents divided by R, (p − |z − c|²)/2. */
const scores = (keys, z) => keys.map(({ x, p }) => (p - x.reduce((total, c, i) => total + (z[i] - c) ** 2, 0)) / 2);

/** How far the best score leads the second, and the weight outside the best cell at the rate R. */
export function leak(keys, z, R) {
  const s = scores(keys, z);
  const best = Math.max(...s);
  const behind = s.map((score) => best - score).sort((a, b) => a - b).slice(1);
  const others = behind.reduce((total, t) => total + Math.exp(-R * t), 0);
  return { margin: behind[0] ?? Infinity, outside: others / (1 + others), cells: s.length };
}

/** The largest error seen of the keys at the rate R, in one dimension. */
export function errorAt(keys, R, f, box) {
  const wire = { rates: [R === "hard" ? 1 : R], centers: keys.map((k) => k.x), biases: null, values: keys.map((k) => k.v), slopes: null };
  const head = headOf(wire, { hard: R === "hard" });
  return new ErrorSearch(f, box, 1).refine(head, cellsOf(head, box)).seen;
}

/** The square root of (1 + 9q + 25q³ + …)/(1 + q + q³ + …), q = e^{−κ}: the mean distance over half a cell, squared and averaged. */
export function spread(kappa) {
  let above = 0, below = 0;
  for (let k = 0; k < 60; k += 1) {
    const q = Math.exp((-kappa * k * (k + 1)) / 2);
    above += (2 * k + 1) ** 2 * q;
    below += q;
  }
  return Math.sqrt(above / below);
}

/** Whether the keys are still the grid of the lesson, so that the formula for grids applies. */
const sameCenters = (keys, expected) =>
  keys.length === expected.length && keys.every((k, j) => k.x.every((c, i) => Math.abs(c - expected[j].x[i]) < 1e-9) && k.p === 0);

const rates = (from, to, steps) => Array.from({ length: steps + 1 }, (_, k) => short(from * (to / from) ** (k / steps)));
const isHard = (state) => state.R === "hard";
const rateKnob = (from, to) => ({
  id: "rate", label: "Inverse temperature R", values: [...rates(from, to, 40), "hard"],
  read: (state) => state.R, apply: (R) => ({ R }),
});

const PART_1 = "From one affine function to Theorem 4.1";
const PART_2 = "How hard should a head be?";
const PART_3 = "Other approximations and the second paper";

const score = row(sub("s", "j"), "(", "x", ")");
const distance = bars("x", "−", sub("c", "j"));
const gap = bars("net", "−", "f");

export const LESSONS = [
  {
    name: "one-key", part: PART_1, title: "One key: an affine function",
    text: [
      "With a single key there is no other score to compare s(x) = a·x + b with. The softmax gives this key the weight 1 everywhere.",
      "The head returns the value of the key, which may be an affine function of the query: here it is the tangent plane of f at the key.",
    ],
    formula: formula(
      "net of x equals 1 times V of x, which is v plus g dot x minus c",
      "net ( x )", "=", "1", "·", "V ( x )", "=", "v", "+", "g", "·", "(", "x", "−", "c", ")",
    ),
    attempt: "Drag the key, or select it in the list and use the arrow keys. The error is 0 at the key, small near it, and large where f bends away from the plane.",
    state: { f: WAVE, d: SQUARE, values: "affine", R: 20, keys: keysAt([0.2, -0.1]), show: ["head", "function", "error"] },
  },
  {
    name: "border", part: PART_1, title: "Two keys: a border",
    text: [
      "Each of two keys has an affine score, and the key with the larger score wins the query.",
      "The border, where both scores are equal, is a straight line (a hyperplane in more dimensions) at a right angle to the difference of the two slopes.",
    ],
    formula: formula(
      "a 1 minus a 2, dot x, plus b 1 minus b 2 equals 0",
      score, "=", sub("a", "j"), "·", "x", "+", sub("b", "j"), NEXT_LINE,
      "(", sub("a", "1"), "−", sub("a", "2"), ")", "·", "x", "+", sub("b", "1"), "−", sub("b", "2"), "=", "0",
    ),
    attempt: "Drag one key around the other. The border turns with it and stays at a right angle to the line between the two keys.",
    state: { f: WAVE, d: SQUARE, R: "hard", keys: keysAt([-0.45, -0.2], [0.4, 0.3]), show: ["cells", "head"], tint: "key" },
  },
  {
    name: "maximum", part: PART_1, title: "The maximum is convex, and so are the cells",
    text: [
      "The maximum of affine functions is a convex function. The set where one of them is the largest is an intersection of half-spaces, so it is convex too.",
      "Here the value of every key is its own score, so the hard head computes the maximum itself. A soft head with N keys is below the maximum by at most W((N − 1)/e)/R.",
    ],
    formula: formula(
      "U j is the set of x where s j of x is at least s k of x for all k",
      sub("U", "j"), "=", "{", "x", ":", score, "=", max("k"), sub("s", "k"), "( x )", "}",
    ),
    attempt: "Move R. The largest error stays below the bound at every temperature. W is Lambert's function, the inverse of w·exp(w).",
    state: {
      f: "max(abs(x), max(abs(y), 0.3))", d: SQUARE, cells: "power", values: "affine", follow: false, R: 20, tint: "key",
      keys: [[1, 0], [-1, 0], [0, 1], [0, -1]].map((a) => key(a, 1, a, 1)).concat([key([0, 0], 0.3, [0, 0], 0.6)]),
    },
    knobs: [rateKnob(2, 500)],
    figures: ({ state, seen }) => [
      { id: "bound", label: "W((N − 1)/e)/R", value: isHard(state) ? 0 : lambert((state.keys.length - 1) / Math.E) / state.R },
      { id: "seen", label: "largest error seen", value: seen },
    ],
  },
  {
    name: "voronoi", part: PART_1, title: "Equal powers: Voronoi cells",
    text: [
      "Take the center c as the slope of a score and −|c|²/2 as its offset.",
      "Then the largest score belongs to the nearest center, and the cells are the Voronoi cells of the centers.",
    ],
    formula: formula(
      "c j dot x minus half the square of c j equals half the square of x minus half the squared distance of x from c j",
      sub("c", "j"), "·", "x", "−", frac("1", "2"), sup(bars(sub("c", "j")), "2"), "=",
      frac("1", "2"), sup(bars("x"), "2"), "−", frac("1", "2"), sup(distance, "2"),
    ),
    attempt: "Drag keys about and add some. Each border lies halfway between two keys.",
    state: { f: WAVE, d: SQUARE, R: "hard", keys: keysAt(...SEVEN), show: ["cells", "head"], tint: "key" },
  },
  {
    name: "powers", part: PART_1, title: "Powers: every partition by affine scores",
    text: [
      "A power p raises or lowers the offset of a key, so its cell grows or shrinks while its center stays. Every partition by affine scores is such a power diagram.",
      "A key whose power is too low wins nowhere in the box: it is dead, and drawn in grey.",
    ],
    formula: formula(
      "U j is the set of x where the squared distance from c j minus p j is smallest, and p j is 2 b j plus the square of a j",
      sub("U", "j"), "=", "{", "x", ":", sup(distance, "2"), "−", sub("p", "j"), words(" is smallest"), "}", NEXT_LINE,
      sub("p", "j"), "=", "2", sub("b", "j"), "+", sup(bars(sub("a", "j")), "2"),
    ),
    attempt: "Raise the power of key 5, the grey one, until it wins a cell again. Then raise it further and watch its neighbours die.",
    state: {
      f: WAVE, d: SQUARE, cells: "power", R: "hard", show: ["cells", "head"], tint: "key",
      keys: SEVEN.map((center, j) => key(center, 0, [0, 0], [0.1, 0, 0.1, 0.25, -0.4, 0, 0.05][j])),
    },
    knobs: [{
      id: "power", label: "Power of key 5", values: Array.from({ length: 31 }, (_, k) => short(-0.4 + k * 0.05)),
      read: (state) => state.keys[4]?.p, apply: (p, state) => ({ keys: state.keys.map((k, j) => (j === 4 ? { ...k, p } : k)) }),
    }],
  },
  {
    name: "softmax", part: PART_1, title: "Softmax: shares instead of a winner",
    text: [
      "An attention head does not pick a winner. It gives every key a weight: the exponential of R times its score, divided by the sum of all these exponentials.",
      "R is the inverse temperature: at a small R the weight is spread over many keys, and at a large R one key has nearly all of it.",
    ],
    formula: formula(
      "w j of x equals the exponential of R s j of x, divided by the sum over k of the exponential of R s k of x",
      sub("w", "j"), "( x )", "=", frac(sup("e", row("R", score)), row(sum("k"), sup("e", row("R", sub("s", "k"), "( x )")))),
    ),
    attempt: "Move the pointer over a picture to see the weights of the query under it. Then move R from soft to hard.",
    state: { f: WAVE, d: SQUARE, R: 12, keys: keysAt(...SEVEN), show: ["cells", "head"], at: [0, 0.2] },
    knobs: [rateKnob(1, 400)],
  },
  {
    name: "values", part: PART_1, title: "Values: what the cells hold",
    text: [
      "The head returns the mean of all values under these weights. For a large R this is nearly the value of the cell that the query is in.",
      "With constant values a hard head is a staircase. With affine values, here the tangent planes of f, it consists of flat pieces that lie closer to f.",
    ],
    formula: formula(
      "net of x equals the sum over j of w j of x times V j of x, and tends to V j of x on U j as R grows",
      "net ( x )", "=", sum("j"), sub("w", "j"), "( x )", sub("V", "j"), "( x )", NEXT_LINE, "net ( x )", "→", sub("V", "j"), "( x )", words(" inside "), sub("U", "j"), words(" as "), "R", "→", "∞",
    ),
    attempt: "Switch the values between constant and affine and compare the largest error seen.",
    state: { f: WAVE, d: SQUARE, R: "hard", keys: grid2d(5), show: ["head", "function", "error"] },
    knobs: [{
      id: "values", label: "Values", values: ["constant", "affine"], read: (state) => state.values, apply: (values) => ({ values }),
    }],
    figures: ({ seen }) => [{ id: "seen", label: "largest error seen", value: seen }],
  },
  {
    name: "theorem", part: PART_1, title: "Refine the cells: Theorem 4.1",
    text: [
      "Let every key of a grid hold f at its center. Then the error is at most the Lipschitz constant L times the mean distance from the query to the keys. This distance is at most half the diagonal of a cell times a factor λ close to 1, which accounts for the leakage to other cells.",
      "Smaller cells make this as small as you like. With a modulus of continuity in place of L, the same argument covers every continuous function on a box.",
    ],
    formula: formula(
      "the error is at most the sum of w j times L times the distance from c j, which is at most L times half of h times the square root of m times lambda; lambda tends to 1 as R grows",
      gap, "≤", sum("j"), sub("w", "j"), "L", distance, "≤", "L", "·", frac("h", "2"), root("m"), "·", "λ", NEXT_LINE, "λ", "=",
      root(frac(row("1", "+", "9", "q", "+", "25", sup("q", "3"), "+", "…"), row("1", "+", "q", "+", sup("q", "3"), "+", "…"))), words(" ,   "), "q", "=", sup("e", row("−", "R", sup("h", "2"))),
    ),
    attempt: "Increase the number of cells per axis. When the width of the cells halves, so does the promise. Here f has L = 3, and R = 8/h².",
    state: { f: WAVE, d: SQUARE, R: 32, keys: grid2d(4), show: ["cells", "head", "error"] },
    knobs: [{
      id: "cells", label: "Cells per axis", values: [2, 3, 4, 5, 6, 7, 8],
      read: (state) => Math.round(Math.sqrt(state.keys.length)),
      apply: (count) => ({ keys: grid2d(count), R: short(2 * count * count) }),
    }],
    figures: ({ state, seen }) => {
      const count = Math.round(Math.sqrt(state.keys.length));
      const h = 2 / count;
      const fits = sameCenters(state.keys, grid2d(count)) && state.follow && state.values === "constant" && state.f === WAVE;
      const promise = fits ? (3 * h * Math.SQRT2 * spread(isHard(state) ? 1e6 : state.R * h * h)) / 2 : null;
      return [
        { id: "width", label: "width h of a cell", value: h },
        { id: "promise", label: "promise of the theorem", value: promise, missing: "the keys are no longer the grid" },
        { id: "seen", label: "largest error seen", value: seen },
      ];
    },
  },
  {
    name: "leakage", part: PART_2, title: "Leakage: Proposition 3.2",
    text: [
      "Where the best of N scores leads every other by at least Δ, at most (N − 1)e^(−RΔ) of the weight lies outside the best cell. So R = (ln(N − 1) − ln ε)/Δ is enough to keep it below ε.",
      "The paper prints Δ(ln(N − 1) − ln ε): it multiplies by Δ where it must divide. For small Δ that R is far too small. The last figure below is the weight that it leaves outside.",
    ],
    formula: formula(
      "the sum of the weights outside the best cell is at most N minus 1 times e to the minus R Delta, and R is at least ln of N minus 1 minus ln epsilon, over Delta",
      sum("j ≠ best"), sub("w", "j"), "≤", "( N − 1 )", sup("e", "− R Δ"), NEXT_LINE, "R", "≥", frac("ln ( N − 1 ) − ln ε", "Δ"),
    ),
    attempt: "Move R and compare the weight outside with its bound. Then drag a key so that the marked query comes closer to a border: Δ shrinks, and the leakage grows.",
    state: { f: WAVE, d: SQUARE, R: 40, keys: keysAt([-0.55, -0.35], [0.5, -0.45], [0.05, 0.6]), show: ["cells", "head"], tint: "key", at: [-0.1, -0.2] },
    knobs: [rateKnob(1, 2000)],
    figures: ({ state }) => {
      const z = state.at ?? [-0.1, -0.2];
      const R = isHard(state) ? Infinity : state.R;
      const { margin, outside, cells } = leak(state.keys, z, Number.isFinite(R) ? R : 1e300);
      const logs = Math.log(Math.max(cells - 1, 1)) - Math.log(0.01);
      return [
        { id: "query", label: "marked query", value: `(${z.map(short).join(", ")})` },
        { id: "margin", label: "its margin Δ", value: margin },
        { id: "outside", label: "weight outside the best cell", value: outside },
        { id: "bound", label: "bound (N − 1)e^(−RΔ), at most 1", value: Math.min(1, (cells - 1) * Math.exp(-R * margin)) },
        { id: "needed", label: "R that suffices for ε = 0.01", value: Math.max(0, logs / margin) },
        { id: "printed", label: "R as printed", value: Math.max(0, logs * margin) },
        { id: "left", label: "weight outside at the printed R", value: leak(state.keys, z, logs * margin).outside },
      ];
    },
  },
  {
    name: "wrong-end", part: PART_2, title: "Why zero temperature is not the best choice",
    text: [
      "The theorem lets R go to infinity. The head is then a staircase, and its error is about half the width of a cell times the slope of f.",
      "At a finite R the softmax averages neighbouring cells, and their first-order errors cancel. The same keys and values then come much closer to f. If R is too small, the head averages too widely and the error rises again.",
    ],
    formula: formula(
      "the error is about h squared over 2 kappa times f second derivative, plus h times f prime times 4 pi over kappa times e to the minus 2 pi squared over kappa, with kappa equal to R h squared",
      gap, "≲", frac(sup("h", "2"), "2 κ"), bars("f″"), "+", "h", frac("4 π", "κ"), sup("e", row("−", "2", sup("π", "2"), "/", "κ")), bars("f′"), NEXT_LINE, "κ", "=", "R", sup("h", "2"),
    ),
    attempt: "Move R from hard to soft. The chart shows the largest error at every R, and the dot is where you are.",
    state: { f: "sin(3*x)", d: INTERVAL, R: 1000, follow: false, keys: row1d(8, 2).map((c) => key([c], short(Math.sin(3 * c)))) },
    knobs: [rateKnob(4, 4000)],
    figures: ({ state, seen, f, box }) => {
      const curve = errorCurve(state, f, box);
      const best = curve.reduce((a, b) => (b[1] < a[1] ? b : a));
      return [
        { id: "seen", label: "largest error seen", value: seen },
        { id: "best", label: `least error, at R = ${short(Number(best[0].toPrecision(3)))}`, value: best[1] },
        { id: "hard", label: "error of the hard head", value: errorAt(state.keys, "hard", f, box) },
      ];
    },
    chart: ({ state, f, box }) => ({
      points: errorCurve(state, f, box), mark: isHard(state) ? 4000 : state.R, across: "inverse temperature R", up: "largest error",
    }),
  },
  {
    name: "ghosts", part: PART_2, title: "Ghosts: keys beyond the edge",
    text: [
      "Near the edge of the box a soft head has neighbours on one side only, and its average is pulled inwards.",
      "Ghosts are keys whose centers lie outside the box. They win no query of the box, but their weights reach into it. With twelve keys in all, ghosts lower the error from 0.01 to a few millionths.",
    ],
    formula: formula(
      "c k equals minus 1 plus k minus g plus one half times h, with h equal to 2 over P minus 2 g",
      sub("c", "k"), "=", "−", "1", "+", "(", "k", "−", "g", "+", frac("1", "2"), ")", "h", words(" ,   "), "k", "=", "0 , … , P − 1", NEXT_LINE, "h", "=", frac("2", "P − 2 g"),
    ),
    attempt: "Move some of the twelve keys outside with the slider. All these heads have κ = R h² = 1, and their values are fitted by least squares at points inside the box.",
    state: { f: "sin(3*x)", d: INTERVAL, ...fittedState(FITTED.ghosts[0]) },
    knobs: [{
      id: "ghosts", label: "Ghosts beyond each end", values: FITTED.ghosts.map((_, g) => g),
      read: (state) => Math.max(0, FITTED.ghosts.findIndex((head) => head.rate === state.R)), apply: (g) => fittedState(FITTED.ghosts[g]),
    }],
    figures: ({ seen, state }) => [
      { id: "outside", label: "keys outside the box", value: String(state.keys.filter((k) => Math.abs(k.x[0]) > 1).length) },
      { id: "seen", label: "largest error seen", value: seen },
    ],
  },
  {
    name: "chebyshev", part: PART_3, title: "Compared with Chebyshev interpolation",
    text: [
      "The dashed curve is the polynomial that interpolates f at n Chebyshev points. The head has n keys with fitted values.",
      "This f has complex poles near the interval, so polynomials converge slowly and the head is closer. If f itself is a polynomial of degree below n, interpolation is exact and the head is not.",
    ],
    formula: formula(
      "p of x equals the sum over k below n of a k times T k of x",
      "p ( x )", "=", "<munderover><mo>∑</mo><mrow><mi>k</mi><mo>=</mo><mn>0</mn></mrow><mrow><mi>n</mi><mo>−</mo><mn>1</mn></mrow></munderover>", sub("a", "k"), sub("T", "k"), "( x )", NEXT_LINE,
      "net ( x )", "=", "<munderover><mo>∑</mo><mrow><mi>k</mi><mo>=</mo><mn>0</mn></mrow><mrow><mi>n</mi><mo>−</mo><mn>1</mn></mrow></munderover>", sub("w", "k"), "( x )", sub("V", "k"),
    ),
    attempt: "Increase n. Both errors fall geometrically, and that of the head falls faster.",
    state: { f: "1/(1 + 25*x^2)", d: INTERVAL, ...fittedState(FITTED.chebyshev[1]), overlay: { name: "chebyshev", value: 12 } },
    knobs: [{
      id: "count", label: "Keys and coefficients n", values: FITTED.chebyshev.map((head) => head.centers.length),
      read: (state) => state.overlay?.value ?? state.keys.length,
      apply: (n) => ({ ...fittedState(FITTED.chebyshev.find((head) => head.centers.length === n)), overlay: { name: "chebyshev", value: n } }),
    }],
    figures: ({ seen, curves }) => [
      { id: "seen", label: "largest error of the head", value: seen },
      { id: "chebyshev", label: "largest error of the polynomial", value: curves[0]?.error ?? null },
    ],
  },
  {
    name: "ramp", part: PART_3, title: "The ramp of the second paper",
    text: [
      "The second paper builds its networks from a head that clips a line at both ends. The keys of this head are p anchors on [a, b], and the value of each is its own position.",
      "A hard head is off by up to half the spacing Δ of the anchors. At κ = RΔ² = 5.44 a long row of anchors is off by at most 0.0619Δ, an eighth of that.",
    ],
    formula: formula(
      "net of u equals the sum over k of softmax of minus R over 2 times u minus L k squared, times L k, which is about the minimum of b and the maximum of a and u",
      "net ( u )", "=", sum("k"), words("softmax"), "(", "−", frac("R", "2"), sup(row("(", "u", "−", sub("L", "k"), ")"), "2"), ")", sub("L", "k"), NEXT_LINE, "net ( u )", "≈", words("min(max("), "u , a", words("), "), "b", words(")"),
    ),
    attempt: "Move κ towards hard and back, then add anchors. In units of Δ the error hardly changes with their number.",
    state: { f: "min(max(x, -0.5), 0.5)", d: INTERVAL, ...rampState(9, 5.44) },
    knobs: [
      { id: "anchors", label: "Anchors p", values: [3, 5, 9, 13, 17, 25, 33], read: (state) => state.keys.length, apply: (p, state) => rampState(p, rampKappa(state)) },
      {
        id: "kappa", label: "Sharpness κ = RΔ²", values: [...rates(1, 64, 24).slice(0, 10), 5.44, ...rates(1, 64, 24).slice(10), 256],
        read: rampKappa, apply: (kappa, state) => rampState(state.keys.length, kappa),
      },
    ],
    figures: ({ state, seen }) => {
      const step = 1 / (state.keys.length - 1);
      return [
        { id: "spacing", label: "spacing Δ", value: step },
        { id: "seen", label: "largest error seen", value: seen },
        { id: "ratio", label: "error in units of Δ", value: seen / step },
      ];
    },
  },
  {
    name: "descent", part: PART_3, title: "Gradient descent in a prompt",
    text: [
      "The dots are the examples of a prompt, and r are the residuals of w·(1, x) at them. A layer attends to the examples and to their mirror images with scores ±ε r. Up to a term of order ε³ it returns ε times the gradient of the mean of r²/2.",
      "So each layer takes one step of gradient descent on a prompt that it has never seen. The dashed line is w·(1, x) after the chosen number of layers. The head in the picture is a different one: its keys are the examples themselves.",
    ],
    formula: formula(
      "the sum of softmax of plus or minus epsilon r i times plus or minus x i equals the sum of hyperbolic sines of epsilon r i times x i over the sum of hyperbolic cosines of epsilon r i, which is epsilon times the gradient plus order epsilon cubed",
      frac(row(sum("i"), words("sinh"), "(", "ε", sub("r", "i"), ")", sub("x", "i")), row(sum("i"), words("cosh"), "(", "ε", sub("r", "i"), ")")), "=", "ε", "·", frac("1", "n"), sum("i"), sub("r", "i"), sub("x", "i"), "+", "O (", sup("ε", "3"), ")",
    ),
    attempt: "Add layers one by one. The weights were fixed before the prompt was chosen; here ε = 0.05 and the step size is 1.",
    state: {
      f: "0.3 + 0.8*x", d: INTERVAL, R: 60, follow: false, keys: PROMPT.map(([x, y]) => key([x], y)), overlay: { name: "descent", value: 3 },
    },
    knobs: [{
      id: "steps", label: "Layers", values: Array.from({ length: 21 }, (_, k) => k), read: (state) => state.overlay?.value ?? 0,
      apply: (value) => ({ overlay: { name: "descent", value } }),
    }],
    figures: ({ state }) => {
      const steps = state.overlay?.value ?? 0;
      const w = descent(steps, "attention");
      const exact = descent(steps, "exact");
      return [
        { id: "w", label: "w by attention", value: `(${w.map((c) => c.toFixed(6)).join(", ")})` },
        { id: "exact", label: "w by exact descent", value: `(${exact.map((c) => c.toFixed(6)).join(", ")})` },
        { id: "apart", label: "their distance", value: Math.hypot(w[0] - exact[0], w[1] - exact[1]) },
        { id: "error", label: "error of the next gradient", value: gradientError(w) },
        { id: "bound", label: "its bound, of order ε²", value: gradientBound(w) },
      ];
    },
  },
];

/** A fitted head of lesson_data.js as a patch of the state. */
function fittedState(head) {
  return { R: head.rate, follow: false, cells: "voronoi", values: "constant", keys: head.centers.map((c, j) => key([c], head.values[j])) };
}

function rampState(p, kappa) {
  const step = 1 / (p - 1);
  return {
    R: short(kappa / (step * step)), follow: false,
    keys: Array.from({ length: p }, (_, k) => key([short(-0.5 + k * step)], short(-0.5 + k * step))),
  };
}

function rampKappa(state) {
  return isHard(state) ? 256 : short(state.R / (state.keys.length - 1) ** 2);
}

let remembered = { keys: null, f: null, curve: [] };
/** Error against R for the keys of the state, remembered while they stay the same. */
function errorCurve(state, f, box) {
  if (remembered.keys !== state.keys || remembered.f !== f) {
    remembered = { keys: state.keys, f, curve: rates(4, 4000, 120).map((R) => [R, errorAt(state.keys, R, f, box)]) };
  }
  return remembered.curve;
}
