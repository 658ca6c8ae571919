/**
 * The state of the page: one plain object, readable in the address (`location.hash`), so that a link, a reload and the
 * back button restore it.
 *
 *     initial()                    the state of an empty hash
 *     fromHash(text)               {state, notes}: bad entries keep their initial value and leave a note in plain English
 *     toHash(state)                "#tab=playground&f=…": only what differs from initial(), numbers with six digits
 *     get()                        the current state; treat it as read-only
 *     update(patch, how)           merges the patch. how = {push: true} adds a history entry, {live: true} leaves the
 *                                  address alone (the middle of a drag: the entry before it stays the one to go back to),
 *                                  otherwise the current entry is replaced
 *     subscribe(fn)                fn(state, previous, source), source "update" or "address"; returns a function that ends it
 *     start()                      reads the address and listens to it; returns the notes of the first reading
 *     dimensionOf(d)               1 for "[0,1]", 2 for "[0,1]^2" and "[0,1] x [0,2]"
 *     freshKeys(dimension, box)    the keys of a new playground
 *
 * @typedef {{x: number[], p: number, v: number, g: number[]}} Key  center, power, value, slope of the value
 * @typedef {Object} State
 * @property {"playground"|"compile"|"lessons"} tab
 * @property {string} f  the function as typed
 * @property {string} d  the domain as typed
 * @property {"voronoi"|"power"|"affine"} cells
 * @property {"constant"|"affine"} values
 * @property {boolean} follow  values (and slopes) are those of f at the centers; otherwise those of the keys
 * @property {number|"hard"} R  the rate: larger is harder; "hard" takes the largest exponent
 * @property {Key[]} keys
 * @property {string[]} show  the panes: cells, head, function, error
 * @property {"value"|"key"} tint  what colours the cells
 * @property {number} output  which output of a vector-valued function
 * @property {string} lesson
 * @property {number} tol
 * @property {string} method
 * @property {string} dtype
 * @property {string} norm  "inf" or a number of at least 1
 * @property {{name: string, value: number}|null} overlay
 * @property {number[]|null} at  a marked query: its weights are shown while no pointer is over the picture
 */

const TABS = ["playground", "compile", "lessons"];
export const PANES = ["cells", "head", "function", "error"];
const MOST_KEYS = 4096;
const MOST_TEXT = 2000;

/** @returns {State} */
export function initial() {
  return {
    tab: "playground", f: "sin(3*x) + x*cos(2*y)", d: "[-1,1]^2", cells: "voronoi", values: "constant", follow: true,
    R: 60, keys: freshKeys(2), show: [...PANES], tint: "value", output: 0, lesson: "", tol: 0.05, method: "auto",
    dtype: "float64", norm: "inf", overlay: null, at: null,
  };
}

/** Keys of a new playground: a shifted lattice in two dimensions, equal steps in one. The box defaults to [-1, 1]^m. */
export function freshKeys(dimension, box = { lo: [-1, -1], hi: [1, 1] }) {
  const shares = dimension === 1
    ? [0.07, 0.21, 0.36, 0.5, 0.64, 0.79, 0.93].map((s) => [s])
    : [[0.13, 0.16], [0.47, 0.11], [0.83, 0.17], [0.29, 0.42], [0.66, 0.44], [0.93, 0.55], [0.08, 0.64], [0.46, 0.72],
      [0.77, 0.81], [0.22, 0.9], [0.54, 0.95]];
  return shares.map((share) => ({
    x: share.map((s, i) => rounded(box.lo[i] + s * (box.hi[i] - box.lo[i]))), p: 0, v: 0, g: share.map(() => 0),
  }));
}

/** The number of axes that a domain text names; 0 where it names none. */
export function dimensionOf(d) {
  let count = 0;
  for (const found of d.matchAll(/\[[^\]]*\](?:\s*(?:\^|\*\*)\s*(\d+))?/g)) count += found[1] ? Number(found[1]) : 1;
  return count;
}

/** A number as the address stores it: six significant digits, no trailing zeros. */
export function rounded(x) {
  return Number(x.toPrecision(6));
}

const number = (text) => (text.trim() === "" ? NaN : Number(text));
const oneOf = (choices) => (text) => (choices.includes(text) ? text : undefined);
const positive = (text) => (number(text) > 0 && Number.isFinite(number(text)) ? number(text) : undefined);
const text = (longest) => (value) => (value.length <= longest ? value : undefined);

/** How each entry of the address is read (undefined: not understood) and written. */
const ENTRIES = {
  tab: [oneOf(TABS), String],
  lesson: [(value) => (/^[\w-]{0,60}$/.test(value) ? value : undefined), String],
  f: [text(MOST_TEXT), String],
  d: [text(200), String],
  cells: [oneOf(["voronoi", "power", "affine"]), String],
  values: [oneOf(["constant", "affine"]), String],
  follow: [(value) => ({ 1: true, 0: false })[value], (value) => (value ? "1" : "0")],
  R: [(value) => (value === "hard" ? value : positive(value)), (value) => (value === "hard" ? value : String(rounded(value)))],
  show: [readPanes, (value) => value.join(",")],
  tint: [oneOf(["value", "key"]), String],
  output: [(value) => (/^\d{1,4}$/.test(value) ? Number(value) : undefined), String],
  tol: [positive, (value) => String(rounded(value))],
  method: [(value) => (/^[\w-]{1,40}$/.test(value) ? value : undefined), String],
  dtype: [oneOf(["float64", "float32", "float16", "bfloat16"]), String],
  norm: [(value) => (value === "inf" || Number(value) >= 1 ? value : undefined), String],
  at: [readPoint, (value) => (value ? value.map(rounded).join(",") : "")],
  overlay: [readOverlay, (value) => (value ? `${value.name}:${rounded(value.value)}` : "")],
};

function readPanes(value) {
  const panes = value.split(",").filter((name) => PANES.includes(name));
  return panes.length ? [...new Set(panes)] : undefined;
}

function readPoint(value) {
  if (value === "") return null;
  const point = value.split(",").map(number);
  return point.length <= 2 && point.every(Number.isFinite) ? point : undefined;
}

function readOverlay(value) {
  if (value === "") return null;
  const found = /^([a-z_-]{1,30})(?::(.+))?$/.exec(value);
  const amount = found ? number(found[2] ?? "0") : NaN;
  return Number.isFinite(amount) ? { name: found[1], value: amount } : undefined;
}

/** "x,y,p,v,gx,gy;…" (one axis: "x,p,v,gx"); numbers left out at the end are 0. */
function readKeys(value, dimension) {
  const keys = [];
  for (const part of value.split(";").slice(0, MOST_KEYS)) {
    const numbers = part.split(",").map(number);
    const most = 2 * dimension + 2;
    if (numbers.length < dimension || numbers.length > most || !numbers.every(Number.isFinite)) return undefined;
    while (numbers.length < most) numbers.push(0);
    keys.push({ x: numbers.slice(0, dimension), p: numbers[dimension], v: numbers[dimension + 1], g: numbers.slice(dimension + 2) });
  }
  return keys.length ? keys : undefined;
}

function writeKeys(keys) {
  return keys.map(({ x, p, v, g }) => {
    const numbers = [...x, p, v, ...g].map((number) => rounded(number));
    while (numbers.length > x.length && numbers[numbers.length - 1] === 0) numbers.pop();
    return numbers.join(",");
  }).join(";");
}

/**
 * @param {string} hash  with or without the leading "#"
 * @returns {{state: State, notes: string[]}}
 */
export function fromHash(hash) {
  const state = initial();
  const notes = [];
  const entries = new Map();
  for (const part of hash.replace(/^#/, "").split("&")) {
    if (part === "") continue;
    const [name, ...rest] = part.split("=");
    try {
      entries.set(name, decodeURIComponent(rest.join("=").replaceAll("+", "%20")));
    } catch {
      notes.push(`The address has an entry ${name} that cannot be decoded; it is ignored.`);
    }
  }
  for (const [name, value] of entries) {
    if (name === "keys") continue;
    const read = Object.hasOwn(ENTRIES, name) ? ENTRIES[name][0](value) : undefined; // "constructor" is no entry
    if (read === undefined) notes.push(`The address has ${name}=${value.slice(0, 40)}, which is not understood; it is ignored.`);
    else state[name] = read;
  }
  const dimension = dimensionOf(state.d) === 1 ? 1 : 2;
  state.keys = defaultKeys(state.d);
  if (entries.has("keys")) {
    const keys = readKeys(entries.get("keys"), dimension);
    if (keys) state.keys = keys;
    else notes.push(`The address has keys that are not lists of ${dimension} to ${2 * dimension + 2} numbers; fresh keys are used.`);
  }
  return { state, notes };
}

/** The keys of an address that names none. */
function defaultKeys(d) {
  return freshKeys(dimensionOf(d) === 1 ? 1 : 2, roughBox(d));
}

/** The box of a domain text whose ends are plain numbers; [-1, 1] for other ends. The server reads the text for good. */
function roughBox(d) {
  const lo = [], hi = [];
  for (const found of d.matchAll(/\[([^\],]*),([^\],]*)\](?:\s*(?:\^|\*\*)\s*(\d+))?/g)) {
    const ends = [number(found[1]), number(found[2])];
    const good = ends.every(Number.isFinite) && ends[0] < ends[1];
    for (let k = 0; k < Math.min(Number(found[3] ?? 1), 2); k += 1) {
      lo.push(good ? ends[0] : -1);
      hi.push(good ? ends[1] : 1);
    }
  }
  while (lo.length < 2) { lo.push(-1); hi.push(1); }
  return { lo, hi };
}

/** @param {State} state */
export function toHash(state) {
  const first = initial();
  const parts = [];
  for (const [name, [, write]] of Object.entries(ENTRIES)) {
    const value = write(state[name]);
    if (value !== write(first[name]) || name === "tab") parts.push(`${name}=${readable(value)}`);
  }
  const keys = writeKeys(state.keys);
  if (keys !== writeKeys(defaultKeys(state.d))) parts.push(`keys=${keys}`);
  return `#${parts.join("&")}`;
}

/** Percent-encoding that leaves what is harmless in a fragment, so that a person can read the address. */
function readable(value) {
  return encodeURIComponent(value).replace(/%(2F|3A|2C|3B|5B|5D|5E|24|40|3F|3D)/g, decodeURIComponent).replace(/%20/g, "+");
}

let current = initial();
const subscribers = new Set();

/** @returns {State} */
export function get() {
  return current;
}

/** The state with the digits that the address keeps, so that page, address, Python and proof speak of the same head. */
function tidy(state) {
  const keys = state.keys.map(({ x, p, v, g }) => ({ x: x.map(rounded), p: rounded(p), v: rounded(v), g: g.map(rounded) }));
  return { ...state, keys, R: state.R === "hard" ? state.R : rounded(state.R) };
}

/** @param {Partial<State>} patch */
export function update(patch, { push = false, live = false } = {}) {
  const previous = current;
  current = { ...current, ...patch };
  if (!live) {
    current = tidy(current);
    const hash = toHash(current);
    if (hash !== location.hash) history[push ? "pushState" : "replaceState"](null, "", hash);
  }
  for (const tell of [...subscribers]) tell(current, previous, "update");
}

export function subscribe(fn) {
  subscribers.add(fn);
  return () => subscribers.delete(fn);
}

/** Reads the address and follows it: back, forward, an edited hash. @returns {string[]} notes */
export function start(onNotes = () => {}) {
  const first = fromHash(location.hash);
  current = first.state;
  const follow = () => {
    const { state, notes } = fromHash(location.hash);
    if (toHash(state) === toHash(current)) return;
    const previous = current;
    current = state;
    for (const tell of [...subscribers]) tell(current, previous, "address");
    if (notes.length) onNotes(notes);
  };
  addEventListener("popstate", follow);
  addEventListener("hashchange", follow);
  return first.notes;
}
