/**
 * A function as Python sends it (`Graph.to_json()`: nodes in single assignment form, floats as hexadecimal text), turned
 * into a JavaScript function and into shader source by one table with one line per operation. No text is evaluated.
 *
 *     parseFloatHex("0x1.8p+1")     3
 *     compileNodes(graph, output)   (point) => number in float64, or null for an operation that the table does not know
 *     glsl(graph, output)           "float partitaF(vec2 z) {…}" with its helpers, or null (also for very long graphs)
 *     OPERATIONS                    the table: name -> [arity, JavaScript, GLSL]
 *
 * `graph.limits`, where present, is a list [[node, watched, value], …]: the node has this value where the watched node is 0
 * (sin(x)/x at 0). NaN stands for "undefined".
 *
 * float64 values agree with numpy to a few units in the last place per operation (tests/test_studio_golden.py: 1e-13
 * relative to the larger of 1 and the value). The shader computes in float32: 2^-24 relative per operation, and the
 * sine of a large argument loses the digits that the argument lost.
 */

const SQRT_PI = Math.sqrt(Math.PI);

/** Error function: a series of positive terms below 3, a continued fraction of the complement above. */
export function erf(x) {
  const a = Math.abs(x);
  if (!(a < 6)) return Number.isNaN(x) ? NaN : Math.sign(x);
  if (a < 3) {
    let term = x, sum = x;
    for (let n = 1; n < 80 && Math.abs(term) > 1e-18 * Math.abs(sum); n += 1) {
      term *= (2 * x * x) / (2 * n + 1);
      sum += term;
    }
    return (2 / SQRT_PI) * Math.exp(-x * x) * sum;
  }
  let tail = a;
  for (let n = 60; n > 0; n -= 1) tail = a + n / 2 / tail;
  return Math.sign(x) * (1 - Math.exp(-a * a) / (SQRT_PI * tail));
}

const sigmoid = (x) => (x >= 0 ? 1 / (1 + Math.exp(-x)) : Math.exp(x) / (1 + Math.exp(x)));
const lesser = (a, b) => Math.min(a, b); // NaN wins, as in numpy
const greater = (a, b) => Math.max(a, b);

/** name: [arity (null: one or more), JavaScript, GLSL]; parameters follow the arguments. */
export const OPERATIONS = {
  input: [0, null, null],
  const: [0, null, null],
  add: [2, (a, b) => a + b, (a, b) => `${a} + ${b}`],
  sub: [2, (a, b) => a - b, (a, b) => `${a} - ${b}`],
  mul: [2, (a, b) => a * b, (a, b) => `${a} * ${b}`],
  div: [2, (a, b) => a / b, (a, b) => `p_div(${a}, ${b})`],
  neg: [1, (a) => -a, (a) => `-${a}`],
  pow: [1, (a, k) => a ** k, (a, k) => `p_pow(${a}, ${k})`],
  sum: [null, (...a) => a.reduce((s, x) => s + x), (...a) => a.join(" + ")],
  exp: [1, Math.exp, (a) => `p_exp(${a})`],
  log: [1, Math.log, (a) => `p_log(${a})`],
  sqrt: [1, Math.sqrt, (a) => `p_sqrt(${a})`],
  sin: [1, Math.sin, (a) => `p_sin(${a})`],
  cos: [1, Math.cos, (a) => `p_cos(${a})`],
  tan: [1, Math.tan, (a) => `p_div(p_sin(${a}), p_cos(${a}))`],
  atan: [1, Math.atan, (a) => `p_atan(${a})`],
  tanh: [1, Math.tanh, (a) => `p_tanh(${a})`],
  asinh: [1, Math.asinh, (a) => `p_asinh(${a})`],
  acosh: [1, Math.acosh, (a) => `p_acosh(${a})`],
  atanh: [1, Math.atanh, (a) => `p_atanh(${a})`],
  sigmoid: [1, sigmoid, (a) => `p_sigmoid(${a})`],
  erf: [1, erf, (a) => `p_erf(${a})`],
  abs: [1, Math.abs, (a) => `abs(${a})`],
  min: [2, lesser, (a, b) => `p_min(${a}, ${b})`],
  max: [2, greater, (a, b) => `p_max(${a}, ${b})`],
  relu: [1, (a) => greater(a, 0), (a) => `p_max(${a}, 0.0)`],
  floor: [1, Math.floor, (a) => `floor(${a})`],
  clamp: [1, (a, lo, hi) => lesser(greater(a, lo), hi), (a, lo, hi) => `p_min(p_max(${a}, ${lo}), ${hi})`],
  where: [3, (c, a, b) => (c >= 0 ? a : c < 0 ? b : NaN), (c, a, b) => `(${c} >= 0.0 ? ${a} : (${c} < 0.0 ? ${b} : P_NAN))`],
};

/**
 * Functions that GLSL leaves undefined somewhere, with NaN where they have no value. Drivers may compute sin, exp and log with
 * errors of 2^-11 and worse, so they are written out here, within a few units of float32 for arguments up to about 1e4.
 */
const GLSL_HELPERS = `
#define P_NAN uintBitsToFloat(0x7fc00000u)
#define P_INF uintBitsToFloat(0x7f800000u)
bool p_bad(float x) { return (floatBitsToUint(x) & 0x7f800000u) == 0x7f800000u; }
bool p_nan(float x) { return (floatBitsToUint(x) & 0x7fffffffu) > 0x7f800000u; }
float p_min(float a, float b) { return p_nan(a) ? a : (p_nan(b) ? b : min(a, b)); }
float p_max(float a, float b) { return p_nan(a) ? a : (p_nan(b) ? b : max(a, b)); }
float p_div(float a, float b) { return b != 0.0 ? a / b : (a > 0.0 ? P_INF : (a < 0.0 ? -P_INF : P_NAN)); }
float p_exp(float x) {
  if (p_nan(x)) return x;
  if (x > 88.72) return P_INF;
  if (x < -87.0) return 0.0;
  float k = floor(x * 1.44269504 + 0.5), r = (x - k * 0.693359375) + k * 2.12194440e-4;
  float t = 1.0 + r * (1.0 + r * (0.5 + r * (0.16666667 + r * (0.041666667 + r * (0.0083333333 + r * 0.0013888889)))));
  int half_ = int(k) / 2;
  return t * uintBitsToFloat(uint(half_ + 127) << 23) * uintBitsToFloat(uint(int(k) - half_ + 127) << 23);
}
float p_log(float x) {
  if (!(x > 0.0)) return x == 0.0 ? -P_INF : P_NAN;
  if (p_bad(x)) return x;
  float k = 0.0;
  if (x < 1.2e-38) { x *= 16777216.0; k = -24.0; }
  uint bits = floatBitsToUint(x) - 0x3f3504f3u;
  k += float(int(bits) >> 23);
  float t = uintBitsToFloat((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0, s = t / (t + 2.0), q = s * s;
  return (k * 2.12194440e-4 * -1.0 + 2.0 * s * (1.0 + q * (0.33333333 + q * (0.2 + q * (0.14285714 + q * 0.11111111))))) + k * 0.693359375;
}
float p_sqrt(float x) { return x >= 0.0 ? sqrt(x) : P_NAN; }
float p_wave(float x, int quarter) {
  if (p_bad(x)) return P_NAN;
  float k = floor(x * 0.636619772 + 0.5), r = ((x - k * 1.5703125) - k * 4.837512969970703125e-4) - k * 7.54978995489188e-8, q = r * r;
  int turn = (int(k) + quarter) & 3;
  float s = r + r * q * (-0.16666667 + q * (0.0083333333 + q * (-1.9841270e-4 + q * 2.7557319e-6)));
  float c = 1.0 - 0.5 * q + q * q * (0.041666667 + q * (-0.0013888889 + q * (2.4801587e-5 - q * 2.7557319e-7)));
  float v = (turn & 1) == 1 ? c : s;
  return (turn & 2) == 2 ? -v : v;
}
float p_sin(float x) { return p_wave(x, 0); }
float p_cos(float x) { return p_wave(x, 1); }
float p_atan_unit(float t) {
  float s = t > 0.41421356 ? (t - 1.0) / (t + 1.0) : t, q = s * s;
  float r = s + s * q * (-0.33333333 + q * (0.2 + q * (-0.14285714 + q * (0.11111111 + q * (-0.09090909 + q * 0.0769)))));
  return t > 0.41421356 ? r + 0.78539816 : r;
}
float p_atan(float x) {
  float a = abs(x), r = a > 1.0 ? 1.57079633 - p_atan_unit(1.0 / a) : p_atan_unit(a);
  return p_nan(x) ? x : (x < 0.0 ? -r : r);
}
float p_expm1(float x) {
  return abs(x) < 0.25 ? x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666667 + x * (0.0083333333 + x * 0.0013888889))))) : p_exp(x) - 1.0;
}
float p_log1p(float x) { float u = 1.0 + x; return u == 1.0 ? x : p_log(u) * (x / (u - 1.0)); }
float p_tanh(float x) { if (p_nan(x)) return x; float e = p_expm1(-2.0 * min(abs(x), 20.0)); float r = -e / (e + 2.0); return x < 0.0 ? -r : r; }
float p_asinh(float x) {
  float a = abs(x), r = a > 1e9 ? p_log(a) + 0.69314718 : p_log1p(a + a * a / (1.0 + sqrt(1.0 + a * a)));
  return p_bad(x) ? x : (x < 0.0 ? -r : r);
}
float p_acosh(float x) { float t = x - 1.0; return x >= 1.0 ? (x > 1e9 ? p_log(x) + 0.69314718 : p_log1p(t + sqrt(t * (x + 1.0)))) : P_NAN; }
float p_atanh(float x) { float a = abs(x); return a < 1.0 ? 0.5 * (x < 0.0 ? -1.0 : 1.0) * p_log1p(2.0 * a / (1.0 - a)) : (a == 1.0 ? x * P_INF : P_NAN); }
float p_sigmoid(float x) { float e = p_exp(-abs(x)); return p_nan(x) ? x : (x >= 0.0 ? 1.0 : e) / (1.0 + e); }
float p_erf(float x) {
  float a = abs(x), t = a, s = a;
  if (p_nan(x)) return x;
  if (a < 2.5) { for (int n = 1; n < 32; n++) { t *= 2.0 * a * a / float(2 * n + 1); s += t; } s *= 1.1283792 * p_exp(-a * a); }
  else s = a > 5.0 ? 1.0 : 1.0 - 0.56418958 * p_exp(-a * a) / (a + 0.5 / (a + 1.0 / (a + 1.5 / (a + 2.0 / (a + 2.5 / (a + 3.0 / a))))));
  return x < 0.0 ? -s : s;
}
float p_pow(float x, int k) {
  float r = 1.0, b = x;
  for (int n = abs(k); n > 0; n >>= 1) { if ((n & 1) == 1) r *= b; if (n > 1) b *= b; }
  return k < 0 ? p_div(1.0, r) : r;
}
`;

const LONGEST_SHADER = 600;

/** The float64 number of Python's `float.hex()`, exactly. */
export function parseFloatHex(text) {
  const found = /^(-?)0x([01])(?:\.([0-9a-f]{1,13}))?p([+-]?\d+)$/.exec(text);
  if (!found) return NaN;
  const digits = found[3] ?? "";
  const mantissa = Number.parseInt(found[2] + digits, 16) * 2 ** (-4 * digits.length);
  return (found[1] ? -1 : 1) * mantissa * 2 ** Number(found[4]);
}

const parameter = (value) => (typeof value === "string" ? parseFloatHex(value) : value);

/** Whether the table knows every operation of the graph, with fitting arguments. */
function known(graph) {
  return graph !== null && Array.isArray(graph?.nodes) && graph.nodes.every((node, k) => {
    const operation = Object.hasOwn(OPERATIONS, node.op) ? OPERATIONS[node.op] : null;
    return operation !== null && (operation[0] ?? node.args.length) === node.args.length && node.args.every((a) => a >= 0 && a < k);
  });
}

/**
 * @returns {((point: ArrayLike<number>) => number) | null}
 */
export function compileNodes(graph, output = 0) {
  if (!known(graph) || !(output < graph.outputs.length)) return null;
  const values = new Float64Array(graph.nodes.length);
  const last = graph.outputs[output];
  const limits = new Map((graph.limits ?? []).map(([node, watched, value]) => [node, [watched, parameter(value)]]));
  const steps = [];
  graph.nodes.forEach((node, k) => {
    if (k > last) return;
    const params = node.params.map(parameter);
    if (node.op === "const") { [values[k]] = params; return; }
    steps.push(node.op === "input" ? reader(values, k, params[0]) : worker(values, k, OPERATIONS[node.op][1], node.args, params));
    if (limits.has(k)) steps.push(repair(values, k, ...limits.get(k)));
  });
  return (point) => {
    for (let i = 0; i < steps.length; i += 1) steps[i](point);
    return values[last];
  };
}

const reader = (t, k, i) => (point) => { t[k] = point[i]; };
const repair = (t, k, watched, value) => () => { if (t[watched] === 0) t[k] = value; };

function worker(t, k, rule, args, params) {
  const [a, b, c] = args;
  if (params.length === 1) return () => { t[k] = rule(t[a], params[0]); };
  if (params.length === 2) return () => { t[k] = rule(t[a], params[0], params[1]); };
  if (args.length === 1) return () => { t[k] = rule(t[a]); };
  if (args.length === 2) return () => { t[k] = rule(t[a], t[b]); };
  if (args.length === 3) return () => { t[k] = rule(t[a], t[b], t[c]); };
  return () => { let s = t[a]; for (let i = 1; i < args.length; i += 1) s += t[args[i]]; t[k] = s; };
}

/** A float32 number as GLSL text that reads back as the same number. */
export function glslNumber(x) {
  const single = Math.fround(x);
  if (!Number.isFinite(single)) return single > 0 ? "P_INF" : single < 0 ? "(-P_INF)" : "P_NAN";
  const text = single.toPrecision(9);
  const float = /[.e]/.test(text) ? text : `${text}.0`;
  return single < 0 || Object.is(single, -0) ? `(${float})` : float;
}

/** @returns {string|null} */
export function glsl(graph, output = 0) {
  if (!known(graph) || !(output < graph.outputs.length) || graph.nodes.length > LONGEST_SHADER || graph.inputs > 2) return null;
  const limits = new Map((graph.limits ?? []).map(([node, watched, value]) => [node, [watched, parameter(value)]]));
  const lines = graph.nodes.map((node, k) => {
    const params = node.params.map(parameter);
    let text;
    if (node.op === "input") text = params[0] === 0 ? "z.x" : "z.y";
    else if (node.op === "const") text = glslNumber(params[0]);
    else {
      const written = node.op === "pow" ? params.map(String) : params.map(glslNumber);
      text = OPERATIONS[node.op][2](...node.args.map((a) => `n${a}`), ...written);
    }
    if (limits.has(k)) {
      const [watched, value] = limits.get(k);
      text = `n${watched} == 0.0 ? ${glslNumber(value)} : (${text})`;
    }
    return `  float n${k} = ${text};`;
  });
  return `${GLSL_HELPERS}\nfloat partitaF(vec2 z) {\n${lines.join("\n")}\n  return n${graph.outputs[output]};\n}\n`;
}
