/**
 * A head in float64: exponents, weights, values, cells, dead keys, and the largest error that samples show.
 *
 *     E_j(z) = b_j - 1/2 sum_i R_i (z_i - c_ji)^2      V_j(z) = v_j + sum_i g_ji (z_i - c_ji)
 *     net(z) = sum_j softmax_j(E(z)) V_j(z)             hard: V_j(z) of the first largest exponent
 *
 *     headOf(wire, {hard})      a Head from the head on the wire: {rates, centers, biases, values, slopes, dimension}
 *     wireOf(head)              back again
 *     evaluate(head, x, y)      net at one point; exponents(head, x, y, out); weights(head, x, y, out) -> winner's index
 *     cellsOf(head, box)        {polygons, areas, dead}: the part of the box where each key has the largest exponent, by
 *                               clipping with half-planes (intervals in one dimension); a key without area is dead
 *     ErrorSearch               the largest |net - f| seen: a grid, then corners of cells, then steps uphill
 *
 * Differences z - c come first and exponents are taken relative to the largest, so nothing overflows. Agreement with
 * partita's ScatteredHead: 1e-13 relative to the larger of 1 and the largest |V_j| (tests/test_studio_golden.py); an
 * exponent's rounding error is at most about 4e-16 |E_j|, and a weight's relative error is that of its exponent.
 *
 * @typedef {Object} Head
 * @property {number} n  keys
 * @property {1|2} m  inputs
 * @property {Float64Array} rates  always two entries, 0 for a missing axis
 * @property {Float64Array} centers  2n numbers, 0 for a missing axis
 * @property {Float64Array} biases
 * @property {Float64Array} values
 * @property {Float64Array|null} slopes  2n numbers
 * @property {boolean} hard
 * @typedef {{lo: number[], hi: number[]}} Box
 */

/** @returns {Head} */
export function headOf(wire, { hard = false } = {}) {
  const n = wire.centers.length;
  const m = wire.centers[0].length === 1 ? 1 : 2;
  const head = {
    n, m, hard, rates: new Float64Array(2), centers: new Float64Array(2 * n), biases: new Float64Array(n),
    values: Float64Array.from(wire.values), slopes: wire.slopes ? new Float64Array(2 * n) : null, scratch: new Float64Array(n),
  };
  for (let i = 0; i < m; i += 1) head.rates[i] = wire.rates[Math.min(i, wire.rates.length - 1)];
  for (let j = 0; j < n; j += 1) {
    if (wire.biases) head.biases[j] = wire.biases[j];
    for (let i = 0; i < m; i += 1) {
      head.centers[2 * j + i] = wire.centers[j][i];
      if (head.slopes) head.slopes[2 * j + i] = wire.slopes[j][i];
    }
  }
  return head;
}

/** The head as JSON values of the wire. */
export function wireOf(head) {
  const pairs = (flat) => Array.from({ length: head.n }, (_, j) => Array.from(flat.subarray(2 * j, 2 * j + head.m)));
  return {
    rates: Array.from(head.rates.subarray(0, head.m)), centers: pairs(head.centers),
    biases: head.biases.some((b) => b !== 0) ? Array.from(head.biases) : null, values: Array.from(head.values),
    slopes: head.slopes ? pairs(head.slopes) : null, dimension: head.m,
  };
}

/** Fills `out` with E_j(x, y); returns the index of the first largest. */
export function exponents(head, x, y, out) {
  const { n, centers, biases } = head;
  const halfX = -0.5 * head.rates[0], halfY = -0.5 * head.rates[1];
  let winner = 0, largest = -Infinity;
  for (let j = 0; j < n; j += 1) {
    const dx = x - centers[2 * j], dy = y - centers[2 * j + 1];
    const e = halfX * dx * dx + halfY * dy * dy + biases[j];
    out[j] = e;
    if (e > largest) { largest = e; winner = j; }
  }
  return winner;
}

/** Fills `out` with the weights at (x, y), which sum to 1; returns the index of the first largest. */
export function weights(head, x, y, out) {
  const winner = exponents(head, x, y, out);
  const largest = out[winner];
  let sum = 0;
  for (let j = 0; j < head.n; j += 1) {
    out[j] = head.hard ? Number(j === winner) : Math.exp(out[j] - largest);
    sum += out[j];
  }
  for (let j = 0; j < head.n; j += 1) out[j] /= sum;
  return winner;
}

/** V_j(x, y) */
export function valueOf(head, j, x, y) {
  const v = head.values[j];
  if (!head.slopes) return v;
  return v + (head.slopes[2 * j] * (x - head.centers[2 * j]) + head.slopes[2 * j + 1] * (y - head.centers[2 * j + 1]));
}

/** net(x, y); y is ignored in one dimension. */
export function evaluate(head, x, y = 0) {
  const e = head.scratch;
  const winner = exponents(head, x, y, e);
  if (head.hard) return valueOf(head, winner, x, y);
  const largest = e[winner];
  let top = 0, bottom = 0;
  for (let j = 0; j < head.n; j += 1) {
    const behind = e[j] - largest;
    if (behind < -745) continue;
    const w = Math.exp(behind);
    bottom += w;
    top += w * valueOf(head, j, x, y);
  }
  return top / bottom;
}

const MOST_CELLS = 512;
const MOST_CORNERS = 512;
const SMALLEST_SHARE = 1e-12;
const buffers = [new Float64Array(2 * MOST_CORNERS), new Float64Array(2 * MOST_CORNERS)];

/**
 * @param {Head} head
 * @param {Box} box
 * @returns {{polygons: Float64Array[], areas: Float64Array, dead: Uint8Array}|null}  null for more than 512 keys
 */
export function cellsOf(head, box) {
  if (head.n > MOST_CELLS) return null;
  const polygons = [], areas = new Float64Array(head.n), dead = new Uint8Array(head.n);
  const whole = head.m === 1 ? box.hi[0] - box.lo[0] : (box.hi[0] - box.lo[0]) * (box.hi[1] - box.lo[1]);
  for (let j = 0; j < head.n; j += 1) {
    const polygon = head.m === 1 ? intervalOf(head, box, j) : polygonOf(head, box, j);
    areas[j] = head.m === 1 ? Math.max(0, polygon[1] - polygon[0]) : areaOf(polygon);
    dead[j] = Number(!(areas[j] > SMALLEST_SHARE * whole));
    polygons.push(polygon);
  }
  return { polygons, areas, dead };
}

/** Where E_j >= E_k for all k: [lo, hi], empty if hi < lo. */
function intervalOf(head, box, j) {
  let lo = box.lo[0], hi = box.hi[0];
  const { centers, biases } = head, rate = head.rates[0], c = centers[2 * j];
  for (let k = 0; k < head.n && lo <= hi; k += 1) {
    if (k === j) continue;
    const other = centers[2 * k], slope = rate * (c - other), apart = biases[j] - biases[k];
    if (slope === 0) { if (apart < 0) hi = -Infinity; continue; }
    const edge = (c + other) / 2 - apart / slope;
    if (slope > 0) lo = Math.max(lo, edge); else hi = Math.min(hi, edge);
  }
  return Float64Array.of(lo, hi);
}

function polygonOf(head, box, j) {
  let [from, to] = buffers;
  from.set([box.lo[0], box.lo[1], box.hi[0], box.lo[1], box.hi[0], box.hi[1], box.lo[0], box.hi[1]]);
  let count = 4;
  const { centers, biases, rates } = head, cx = centers[2 * j], cy = centers[2 * j + 1];
  for (let k = 0; k < head.n && count > 0; k += 1) {
    if (k === j) continue;
    const ox = centers[2 * k], oy = centers[2 * k + 1];
    const ax = rates[0] * (cx - ox), ay = rates[1] * (cy - oy), apart = biases[j] - biases[k];
    const mx = (cx + ox) / 2, my = (cy + oy) / 2;
    let inside = 0;
    for (let i = 0; i < count; i += 1) if (ax * (from[2 * i] - mx) + ay * (from[2 * i + 1] - my) + apart >= 0) inside += 1;
    if (inside === count) continue;
    let kept = 0;
    let px = from[2 * count - 2], py = from[2 * count - 1], before = ax * (px - mx) + ay * (py - my) + apart;
    for (let i = 0; i < count && kept < MOST_CORNERS - 2; i += 1) {
      const qx = from[2 * i], qy = from[2 * i + 1], after = ax * (qx - mx) + ay * (qy - my) + apart;
      if ((before >= 0) !== (after >= 0)) {
        const t = before / (before - after);
        to[2 * kept] = px + t * (qx - px);
        to[2 * kept + 1] = py + t * (qy - py);
        kept += 1;
      }
      if (after >= 0) { to[2 * kept] = qx; to[2 * kept + 1] = qy; kept += 1; }
      px = qx; py = qy; before = after;
    }
    count = kept;
    [from, to] = [to, from];
  }
  return from.slice(0, 2 * count);
}

function areaOf(polygon) {
  let twice = 0;
  const n = polygon.length / 2, ox = polygon[0], oy = polygon[1];
  for (let i = 1; i + 1 < n; i += 1) {
    twice += (polygon[2 * i] - ox) * (polygon[2 * i + 3] - oy) - (polygon[2 * i + 2] - ox) * (polygon[2 * i + 1] - oy);
  }
  return Math.abs(twice) / 2;
}

/**
 * The largest |net - f| seen. The values of f on the grid are computed once per function and box. `coarse(head)` is quick
 * enough for every frame; `refine(head, cells)` also looks beside the corners of the cells, where a sharp head errs most,
 * and climbs from the best points. Neither is a bound.
 */
export class ErrorSearch {
  /** @param {(point: number[]) => number} f @param {Box} box @param {1|2} m */
  constructor(f, box, m, perAxis = m === 1 ? 513 : 33) {
    Object.assign(this, { f, box, m, perAxis });
    this.count = m === 1 ? perAxis : perAxis * perAxis;
    this.points = new Float64Array(2 * this.count);
    this.values = new Float64Array(this.count);
    const point = [0, 0];
    for (let k = 0; k < this.count; k += 1) {
      point[0] = this.coordinate(0, k % perAxis);
      point[1] = m === 1 ? 0 : this.coordinate(1, Math.floor(k / perAxis));
      this.points.set(point, 2 * k);
      this.values[k] = f(point);
    }
    const finite = this.values.filter(Number.isFinite);
    this.range = finite.length ? [finite.reduce((a, b) => Math.min(a, b)), finite.reduce((a, b) => Math.max(a, b))] : [0, 1];
    this.undefinedShare = 1 - finite.length / this.count;
  }

  coordinate(axis, k) {
    const t = k / (this.perAxis - 1);
    return (1 - t) * this.box.lo[axis] + t * this.box.hi[axis];
  }

  /** @returns {{seen: number, at: number[]}} */
  coarse(head) {
    let seen = 0, best = 0;
    for (let k = 0; k < this.count; k += 1) {
      const error = Math.abs(evaluate(head, this.points[2 * k], this.points[2 * k + 1]) - this.values[k]);
      if (error > seen && error < Infinity) { seen = error; best = k; }
    }
    return { seen, at: Array.from(this.points.subarray(2 * best, 2 * best + this.m)) };
  }

  /** @returns {{seen: number, at: number[]}} */
  refine(head, cells) {
    const starts = [];
    const offer = (x, y) => {
      const error = this.errorAt(head, x, y);
      if (starts.length < 8 || error > starts[7].error) {
        starts.push({ x, y, error });
        starts.sort((a, b) => b.error - a.error);
        starts.length = Math.min(starts.length, 8);
      }
    };
    for (let k = 0; k < this.count; k += 1) offer(this.points[2 * k], this.points[2 * k + 1]);
    cells?.polygons.forEach((polygon, j) => { if (!cells.dead[j]) this.besideCorners(polygon, offer); });
    for (const start of starts) this.climb(head, start);
    starts.sort((a, b) => b.error - a.error);
    const { x, y, error } = starts[0];
    return { seen: Math.max(0, error), at: this.m === 1 ? [x] : [x, y] };
  }

  /** Corners moved a little into their own cell, where the head has that cell's value. */
  besideCorners(polygon, offer) {
    if (this.m === 1) {
      for (const t of [1e-9, 1 - 1e-9]) offer(polygon[0] + t * (polygon[1] - polygon[0]), 0);
      return;
    }
    const n = polygon.length / 2;
    let mx = 0, my = 0;
    for (let i = 0; i < n; i += 1) { mx += polygon[2 * i] / n; my += polygon[2 * i + 1] / n; }
    for (let i = 0; i < n; i += 1) offer(polygon[2 * i] + 1e-9 * (mx - polygon[2 * i]), polygon[2 * i + 1] + 1e-9 * (my - polygon[2 * i + 1]));
  }

  errorAt(head, x, y) {
    this.point ??= [0, 0];
    this.point[0] = x;
    this.point[1] = y;
    const error = Math.abs(evaluate(head, x, y) - this.f(this.point));
    return error < Infinity ? error : -1;
  }

  climb(head, start) {
    const { lo, hi } = this.box;
    let share = 1 / (this.perAxis - 1);
    for (let round = 0; round < 40 && share > 1e-10; round += 1) {
      let moved = false;
      for (let axis = 0; axis < this.m; axis += 1) {
        for (const sign of [-1, 1]) {
          const step = sign * share * (hi[axis] - lo[axis]);
          const x = axis === 0 ? Math.min(hi[0], Math.max(lo[0], start.x + step)) : start.x;
          const y = axis === 1 ? Math.min(hi[1], Math.max(lo[1], start.y + step)) : start.y;
          const error = this.errorAt(head, x, y);
          if (error > start.error) { Object.assign(start, { x, y, error }); moved = true; }
        }
      }
      if (!moved) share /= 2;
    }
  }
}
