/**
 * The page of an inspected model: a scatter plot and a table of all heads, and a panel for the chosen one.
 *
 * partita/plots/model_page.py writes this file into index.html with its data, as JSON in the element #data:
 *
 *     figures   [{name, label, words}]            what every head has a number for
 *     layers    [{name, figures, null}]           numbers in the order of `figures`; null where undefined
 *     heads     [{layer, head, kind, sentence, about, figures, null, detail, audit}]; null: figures of a random head
 *     tokens    {sequence: [token, …]}            for the sequences that are drawn
 *     palette   the table of partita/plots/colours.py
 *
 * `detail` is base64 of what partita/plots/head_details.py packs; it is unpacked when a head is first drawn. Text reaches the
 * page as text nodes only. The state is in the address after #, so a link shows what its sender saw.
 */

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

// ---- elements ----

/** An element with properties, attributes (names with - and role) and children; strings become text. */
function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key.includes("-") || key === "role" || key === "scope" || key === "colspan") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return made;
}

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A figure for people: three digits or fewer, thousands in full, a dash for what is not defined. */
function short(number, digits = 3) {
  if (number === null || Number.isNaN(number)) return "–";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return number.toExponential(1).replace("e+", "e").replace("-", "−");
  if (size >= 1000) return Math.round(number).toLocaleString("en");
  return String(Number(number.toPrecision(digits))).replace("-", "−");
}

const visible = (token) => token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "␣".repeat(s.length)) || "∅";
const tokenOf = (token) => el("span", { className: "token" }, visible(token));

/** [before, token, after] as one line; only the place if tokens are unknown. */
function contextOf(text, place) {
  if (!text) return el("span", { className: "context" }, place);
  const [before, token, after] = text;
  const glue = (tokens) => tokens.map(visible).join(" ");
  return el("span", { className: "context", title: place }, before.length ? `${glue(before)} ` : "", el("b", {}, visible(token)), after.length ? ` ${glue(after)}` : "");
}

const ruler = document.createElement("canvas").getContext("2d");
const fontOf = (pixels) => `${pixels}px ${getComputedStyle(document.body).fontFamily}`;
/** Width of a text in pixels. */
function widthOf(text, pixels) {
  ruler.font = fontOf(pixels);
  return ruler.measureText(text).width;
}

// ---- colours ----

const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
const isDark = () => dark.matches && !printing;
const theme = () => data.palette[isDark() ? "dark" : "light"];
const channels = (hex) => [1, 3, 5].map((k) => Number.parseInt(hex.slice(k, k + 2), 16));

const points = Object.fromEntries(Object.entries(data.palette.maps).map(([name, colours]) => [name, colours.map(channels)]));

function colourAt(map, t) {
  const stops = points[map];
  const place = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const first = Math.min(Math.floor(place), stops.length - 2);
  return [0, 1, 2].map((c) => Math.round(stops[first][c] + (place - first) * (stops[first + 1][c] - stops[first][c])));
}

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
/** First layers dark, last layers light, as far as either stands out from the background. */
const layerColour = (layer) => {
  const t = data.layers.length > 1 ? layer / (data.layers.length - 1) : 0.4;
  return css(colourAt("value", isDark() ? 0.3 + 0.7 * t : 0.05 + 0.72 * t));
};
/** Paper to ink: 0 is nearly the background, 1 stands out from it. */
const inkAt = (t) => colourAt("weight", isDark() ? 1 - 0.04 - 0.9 * t : t);
/** 256 colours of inkAt. */
const inks = () => Array.from({ length: 256 }, (_, k) => inkAt(k / 255));

// ---- heads ----

const figures = data.figures;
const figureAt = Object.fromEntries(figures.map((f, k) => [f.name, k]));
const numbers = (row) => Float64Array.from(row, (v) => (v === null ? NaN : Number(v)));
const shortLayers = shortened(data.layers.map((layer) => layer.name));
const heads = data.heads.map((h, index) => ({
  ...h, index, figures: numbers(h.figures), null: numbers(h.null),
  name: `${data.layers[h.layer].name}:${h.head}`, short: `${shortLayers[h.layer]}:${h.head}`,
  text: `${data.layers[h.layer].name}:${h.head} ${h.kind} ${h.sentence}`.toLowerCase(),
}));
for (const layer of data.layers) Object.assign(layer, { figures: numbers(layer.figures), null: numbers(layer.null) });
const headNamed = new Map(heads.map((h) => [h.name, h]));
const anyNull = heads.some((h) => h.null.some((v) => !Number.isNaN(v))); // whether random heads were read
const anyKind = heads.some((h) => h.kind), anySentence = heads.some((h) => h.sentence);
/** A figure of a head or layer, and in brackets that of its random head. */
const withNull = (row, k) => [short(row.figures[k]), anyNull ? el("small", {}, ` (${short(row.null[k])})`) : null];

/** Names without the parts between dots that all of them share: in every place if they have as many parts, else at both ends. */
function shortened(names) {
  const parts = names.map((name) => name.split("."));
  if (names.length < 2) return names.map((name) => name.split(".").at(-1));
  if (parts.every((p) => p.length === parts[0].length)) {
    return parts.map((p) => p.filter((part, k) => parts.some((other) => other[k] !== part)).join("."));
  }
  const least = Math.min(...parts.map((p) => p.length));
  let start = 0, end = 0;
  while (start < least - 1 && parts.every((p) => p[start] === parts[0][start])) start += 1;
  while (end < least - 1 - start && parts.every((p) => p.at(-1 - end) === parts[0].at(-1 - end))) end += 1;
  return parts.map((p) => p.slice(start, p.length - end).join("."));
}

/** A name that may be broken after its dots. */
const breakable = (name) => name.split(/(?<=\.)/).flatMap((part, k) => (k ? [el("wbr"), part] : [part]));

const unpacked = new Map();

/** The details of a head, unpacked once: the JSON with its arrays as typed arrays. */
function detailOf(head) {
  if (!head.detail) return Promise.resolve(null);
  if (!unpacked.has(head.index)) unpacked.set(head.index, unpack(head.detail));
  return unpacked.get(head.index);
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const found = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const types = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f2: Uint16Array };
  for (const [name, [type, offset, size]] of Object.entries(found.arrays)) {
    const array = new types[type](buffer, 4 + length + offset, size);
    found[name] = type === "f2" ? Float32Array.from(array, half) : array;
  }
  for (const steps of [found.position, found.shapeKey]) steps.forEach((step, k) => { if (k) steps[k] += steps[k - 1]; });
  return found;
}

/** A half-precision number from its bits. */
function half(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : fraction * 2 ** -24;
  return bits >> 15 ? -size : size;
}

// ---- state ----

const has = (name) => Object.hasOwn(figureAt, name);
const DEFAULTS = {
  x: has("effective_keys") ? "effective_keys" : figures[0].name, y: has("table_distance") ? "table_distance" : figures[1].name,
  logx: false, logy: false, nulls: true, names: false, filter: "", by: "", low: "", high: "", sort: "", every: false, head: "", query: "",
};
let state = read();
let lit = null; // the head under the pointer
let rows = []; // the heads that pass the filters, sorted

function read() {
  const given = new URLSearchParams(location.hash.slice(1)), found = { ...DEFAULTS };
  for (const [key, usual] of Object.entries(DEFAULTS)) {
    if (given.has(key)) found[key] = typeof usual === "boolean" ? given.get(key) === "1" : given.get(key);
  }
  for (const key of ["x", "y"]) if (!has(found[key])) found[key] = DEFAULTS[key];
  if (!has(found.by)) found.by = "";
  if (!headNamed.has(found.head)) found.head = "";
  return found;
}

function update(change, { push = false } = {}) {
  state = { ...state, ...change };
  const hash = new URLSearchParams();
  for (const [key, usual] of Object.entries(DEFAULTS)) {
    if (state[key] !== usual) hash.set(key, typeof usual === "boolean" ? (state[key] ? "1" : "0") : state[key]);
  }
  const address = `#${hash}`;
  if (address !== (location.hash || "#")) history[push ? "pushState" : "replaceState"](null, "", address);
  return show(Object.keys(change));
}

/** Open the panel of a head, or the overview; where it is out of sight, go there. */
async function choose(head) {
  const opened = update({ head: head ? head.name : "", query: "" }, { push: true });
  const row = document.querySelector("#table tr.chosen"), box = document.querySelector(".heads .scroll");
  if (row && (row.offsetTop < box.scrollTop + 40 || row.offsetTop + row.offsetHeight > box.scrollTop + box.clientHeight)) box.scrollTop = row.offsetTop - box.clientHeight / 2;
  await opened;
  const { top } = $("detail").getBoundingClientRect();
  if (head && (top < 0 || top > 0.7 * innerHeight)) $("detail").scrollIntoView();
}

function passes(head) {
  const low = Number.parseFloat(state.low), high = Number.parseFloat(state.high);
  if (state.by && !(Number.isNaN(low) && Number.isNaN(high))) {
    const value = head.figures[figureAt[state.by]];
    if (!(value >= (Number.isNaN(low) ? -Infinity : low) && value <= (Number.isNaN(high) ? Infinity : high))) return false;
  }
  const layer = data.layers[head.layer].name.toLowerCase();
  return state.filter.toLowerCase().split(/\s+/).filter(Boolean).every((word) => (word.includes("*") ? matches(layer, word) : head.text.includes(word)));
}

/** Whether a text is what a pattern with * says; no regular expression is made of what was typed. */
function matches(text, pattern) {
  const [first, ...rest] = pattern.split("*"), last = rest.pop();
  if (!text.startsWith(first) || text.length < first.length + last.length || !text.endsWith(last)) return false;
  let place = first.length;
  for (const part of rest) {
    const found = text.indexOf(part, place);
    if (found < 0 || found + part.length > text.length - last.length) return false;
    place = found + part.length;
  }
  return true;
}

function sorted(list) {
  if (!state.sort) return list;
  const down = state.sort.startsWith("-"), name = state.sort.replace(/^-/, "");
  const sign = down ? -1 : 1;
  if (name === "kind") return list.toSorted((a, b) => sign * a.kind.localeCompare(b.kind) || a.index - b.index);
  if (!has(name)) return down ? list.toReversed() : list;
  const k = figureAt[name];
  return list.toSorted((a, b) => {
    const [p, q] = [a.figures[k], b.figures[k]];
    if (Number.isNaN(p) || Number.isNaN(q)) return Number.isNaN(p) - Number.isNaN(q) || a.index - b.index; // undefined last
    return p === q ? a.index - b.index : sign * (p < q ? -1 : 1);
  });
}

// ---- scales ----

/** From numbers to pixels, with ticks. */
function scaleOf(values, log, from, to) {
  const known = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
  let lo = known.length ? Math.min(...known) : log ? 0.1 : 0, hi = known.length ? Math.max(...known) : 1;
  const f = log ? Math.log10 : (v) => v;
  let [a, b] = [f(lo), f(hi)];
  const spare = (b - a || Math.abs(a) || 1) * 0.05;
  const zero = !log && a >= 0 && a < 0.3 * b; // near zero the axis begins there
  [a, b] = [zero ? -0.02 * b : a - spare, b + spare];
  const at = (v) => from + ((f(v) - a) / (b - a)) * (to - from);
  const steps = Math.abs(to - from) / 70;
  let ticks = log ? logTicks(a, b) : linearTicks(a, b, steps);
  if (log && ticks.length < 2) ticks = linearTicks(10 ** a, 10 ** b, steps).filter((v) => v > 0); // a narrow range between round numbers
  return { at, ticks, takes: (v) => Number.isFinite(v) && (!log || v > 0) };
}

function linearTicks(a, b, count) {
  const raw = (b - a) / Math.max(2, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= raw) ?? 10);
  const out = [];
  for (let k = Math.ceil(a / step); k * step <= b; k += 1) out.push(Number((k * step).toPrecision(12)));
  return out;
}

function logTicks(a, b) {
  const wide = b - a > 2.5, out = [];
  for (let k = Math.floor(a); k <= b; k += Math.max(1, Math.ceil((b - a) / 7))) {
    for (const m of wide ? [1] : b - a > 1 ? [1, 3] : [1, 2, 3, 5, 7]) {
      const v = Number((m * 10 ** k).toPrecision(3));
      if (Math.log10(v) >= a && Math.log10(v) <= b) out.push(v);
    }
  }
  return out;
}

/** Grid, ticks and names of two axes in a group. */
function axesOf(xScale, yScale, { left, right, top, bottom, xName, yName }) {
  const group = svg("g", { "aria-hidden": "true" });
  for (const v of xScale.ticks) {
    const x = xScale.at(v);
    group.append(svg("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom }), svg("text", { x, y: bottom + 14, "text-anchor": "middle" }, short(v)));
  }
  for (const v of yScale.ticks) {
    const y = yScale.at(v);
    group.append(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }), svg("text", { x: left - 5, y: y + 4, "text-anchor": "end" }, short(v)));
  }
  group.append(svg("text", { class: "axis-name", x: right, y: bottom + 29, "text-anchor": "end" }, xName), svg("text", { class: "axis-name", x: 2, y: 12 }, yName));
  return group;
}

// ---- scatter ----

const scatter = $("scatter");
let spots = []; // {head, x, y, nx, ny} of what is drawn
let marks = null; // the group over the points

function drawScatter() {
  const width = scatter.clientWidth || 560, height = Math.round(Math.max(250, Math.min(0.6 * width, 0.36 * innerHeight)));
  const [kx, ky] = [figureAt[state.x], figureAt[state.y]], kept = new Set(rows);
  const both = (k) => heads.flatMap((h) => (state.nulls ? [h.figures[k], h.null[k]] : [h.figures[k]]));
  const box = { right: width - 10, top: 22, bottom: height - 36 }, ys = scaleOf(both(ky), state.logy, box.bottom, box.top);
  box.left = Math.max(44, 10 + 6.5 * Math.max(0, ...ys.ticks.map((v) => short(v).length)));
  const xs = scaleOf(both(kx), state.logx, box.left, box.right);
  const name = (k, log) => figures[k].label + (log ? " (log)" : "");
  scatter.setAttribute("viewBox", `0 0 ${width} ${height}`);
  scatter.setAttribute("height", height);
  const nulls = svg("g", { "aria-hidden": "true" }), points = svg("g"), names = svg("g", { "aria-hidden": "true" });
  const circles = [];
  spots = [];
  for (const h of heads) {
    const [vx, vy, nx, ny] = [h.figures[kx], h.figures[ky], h.null[kx], h.null[ky]];
    const known = xs.takes(nx) && ys.takes(ny), spot = { head: h, x: xs.at(vx), y: ys.at(vy), nx: known ? xs.at(nx) : null, ny: known ? ys.at(ny) : null };
    if (!xs.takes(vx) || !ys.takes(vy)) continue;
    const inside = kept.has(h);
    if (inside) spots.push(spot);
    circles.push({ x: spot.x, y: spot.y, r: inside ? 5.5 : 3.5 });
    if (state.nulls && known && inside) {
      circles.push({ x: spot.nx, y: spot.ny, r: 4.5 });
      nulls.append(svg("circle", { class: "null", cx: spot.nx, cy: spot.ny, r: 3.5 }));
    }
    points.append(svg("circle", {
      class: inside ? "point" : "point faded", id: `point-${h.index}`, cx: spot.x, cy: spot.y, r: inside ? 5 : 3, fill: layerColour(h.layer),
      role: "option", "aria-selected": String(h.name === state.head), "aria-label": saidOf(h), "data-head": h.name,
    }));
  }
  if (state.names) names.append(...namesBeside(spots, circles, { left: box.left, right: width, top: box.top, bottom: box.bottom }));
  marks = svg("g", { "aria-hidden": "true" });
  scatter.replaceChildren(axesOf(xs, ys, { ...box, xName: name(kx, state.logx), yName: name(ky, state.logy) }), nulls, points, names, marks);
  drawMarks();
  $("meaning").replaceChildren(
    el("b", {}, figures[ky].label), ` (vertical): ${figures[ky].words} `, el("b", {}, figures[kx].label), ` (horizontal): ${figures[kx].words}`,
    missingOf(kx, ky).join(""),
  );
}

/** How many heads the plot does not show, and why. */
function missingOf(kx, ky) {
  const count = { undefined: 0, infinite: 0, log: 0 };
  for (const h of rows) {
    const [x, y] = [h.figures[kx], h.figures[ky]];
    if (Number.isNaN(x) || Number.isNaN(y)) count.undefined += 1;
    else if (!Number.isFinite(x) || !Number.isFinite(y)) count.infinite += 1;
    else if ((state.logx && x <= 0) || (state.logy && y <= 0)) count.log += 1;
  }
  const why = { undefined: "a figure is not defined there", infinite: "a figure is infinite there", log: "a logarithmic axis needs positive values" };
  return Object.keys(why).filter((name) => count[name]).map((name) => ` ${count[name]} ${count[name] === 1 ? "head is" : "heads are"} not shown: ${why[name]}.`);
}

const NAME = 9.5; // pixels, as in the style

/** Names beside their points, where they cover neither another name nor a point; the others are left out. */
function namesBeside(spots, circles, box) {
  const taken = [], out = [];
  for (const { head, x, y } of spots) {
    const size = widthOf(head.short, NAME);
    const places = [[x + 7, y + 3], [x - 7 - size, y + 3], [x - size / 2, y - 9], [x - size / 2, y + 15]].map(([left, base]) => ({ left, right: left + size, top: base - 9, bottom: base + 3, base }));
    const free = places.find((p) => p.left >= box.left && p.right <= box.right && p.top >= box.top && p.bottom <= box.bottom
      && !taken.some((n) => p.left < n.right + 3 && n.left < p.right + 3 && p.top < n.bottom && n.top < p.bottom)
      && !circles.some((c) => (c.x - Math.min(Math.max(c.x, p.left), p.right)) ** 2 + (c.y - Math.min(Math.max(c.y, p.top), p.bottom)) ** 2 < c.r ** 2));
    if (!free) continue;
    taken.push(free);
    out.push(svg("text", { class: "name", x: free.left, y: free.base }, head.short));
  }
  return out;
}

const saidOf = (h) => `${h.name}${h.kind ? `, ${h.kind}` : ""}: ${figures[figureAt[state.x]].label} ${short(h.figures[figureAt[state.x]])}, ${figures[figureAt[state.y]].label} ${short(h.figures[figureAt[state.y]])}`;

function drawMarks() {
  if (!marks) return;
  marks.replaceChildren();
  for (const [head, kind] of [[headNamed.get(state.head), "chosen"], [lit, "lit"]]) {
    const spot = head && spots.find((s) => s.head === head);
    if (!spot) continue;
    if (spot.nx !== null && state.nulls) {
      marks.append(svg("line", { class: "to-null", x1: spot.x, y1: spot.y, x2: spot.nx, y2: spot.ny }), svg("circle", { class: "null-lit", cx: spot.nx, cy: spot.ny, r: 3 }));
    }
    marks.append(svg("circle", { class: kind, cx: spot.x, cy: spot.y, r: 8 }));
  }
}

/** Light up one head everywhere, or none. */
function light(head, { tip = false } = {}) {
  if (lit === head && !tip) return;
  lit = head;
  drawMarks();
  for (const node of document.querySelectorAll("tr.lit, .planes .lit")) node.classList.remove("lit");
  if (head) for (const node of document.querySelectorAll(`[data-row="${head.index}"], [data-plane="${head.index}"]`)) node.classList.add("lit");
  if (head) scatter.setAttribute("aria-activedescendant", `point-${head.index}`); else scatter.removeAttribute("aria-activedescendant");
  const spot = head && tip && spots.find((s) => s.head === head), box = $("tip");
  box.hidden = !spot;
  if (!spot) return;
  const line = (name) => `${figures[figureAt[name]].label} ${short(head.figures[figureAt[name]])}${anyNull ? ` (${short(head.null[figureAt[name]])})` : ""}`;
  box.replaceChildren(el("b", {}, head.name + (head.kind ? ` · ${head.kind}` : "")), line(state.y), el("br"), line(state.x), ...(head.sentence ? [el("br"), head.sentence] : []));
  const room = scatter.clientWidth, left = Math.min(spot.x + 12, room - 12 - Math.min(280, box.offsetWidth));
  box.style.left = `${Math.max(0, left)}px`;
  box.style.top = spot.y > 120 ? "auto" : `${spot.y + 12}px`;
  box.style.bottom = spot.y > 120 ? `${scatter.clientHeight - spot.y + 12}px` : "auto";
}

function nearest(event, reach = 22) {
  const box = scatter.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
  let best = null, least = reach * reach;
  for (const spot of spots) {
    const away = (spot.x - x) ** 2 + (spot.y - y) ** 2;
    if (away < least) [best, least] = [spot.head, away];
  }
  return best;
}

scatter.addEventListener("pointermove", (event) => light(nearest(event), { tip: true }));
scatter.addEventListener("pointerleave", () => light(null, { tip: true }));
scatter.addEventListener("click", (event) => { const head = nearest(event); if (head) choose(head); });
scatter.addEventListener("blur", () => light(null, { tip: true }));
scatter.addEventListener("keydown", (event) => {
  const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const here = spots.find((s) => s.head === (lit ?? headNamed.get(state.head)));
  if (event.key in steps && spots.length) {
    event.preventDefault();
    light((here ? beside(here, steps[event.key]) : spots[0]).head, { tip: true });
  } else if ((event.key === "Enter" || event.key === " ") && lit) {
    event.preventDefault();
    choose(lit);
  }
});

/** The next point in a direction: the nearest one, where going aside counts double; itself if there is none. */
function beside(here, [dx, dy]) {
  let best = here, least = Infinity;
  for (const spot of spots) {
    const along = (spot.x - here.x) * dx + (spot.y - here.y) * dy, aside = Math.abs((spot.x - here.x) * dy) + Math.abs((spot.y - here.y) * dx);
    const later = along === 0 && aside === 0 && (spot.head.index - here.head.index) * (dx - dy) > 0; // same place: order by index
    const away = later ? 1e-9 * Math.abs(spot.head.index - here.head.index) : along > 0 ? along + 2 * aside : Infinity;
    if (away < least) [best, least] = [spot, away];
  }
  return best;
}

function drawLegend() {
  $("legend").replaceChildren(el("span", {}, data.layers.length === 1 ? "layer" : "layers"), ...data.layers.map((layer, k) => {
    const swatch = el("span", { className: "swatch" });
    swatch.style.background = layerColour(k);
    return el("button", { type: "button", title: `Show ${layer.name} only`, "data-testid": `layer-${k}`, onclick: () => update({ filter: state.filter === `${layer.name}:` ? "" : `${layer.name}:` }) }, swatch, shortLayers[k]);
  }));
}

// ---- table ----

const USUAL = ["cells", "margin", "leakage", "effective_keys", "table_distance"];

/** Draw, and leave the keyboard focus on the element of the same name if it was inside. */
function keepingFocus(box, draw) {
  const id = box.contains(document.activeElement) ? document.activeElement.dataset.testid : null;
  draw();
  if (!id) return;
  const again = box.querySelector(`[data-testid="${id}"]`);
  (again && !again.disabled ? again : box).focus({ preventScroll: true });
}

function drawTable() {
  const names = state.every ? figures.map((f) => f.name) : [...new Set([state.y, state.x, ...USUAL])].filter(has);
  const column = (name, label, words) => {
    const down = state.sort === `-${name}`, on = down || state.sort === name;
    const next = name === "head" || name === "kind" ? (state.sort === name ? `-${name}` : name) : down ? name : `-${name}`;
    return el("th", { scope: "col", className: name === "head" || name === "kind" ? "left" : "", "aria-sort": on ? (down ? "descending" : "ascending") : undefined },
      el("button", { type: "button", title: words, "data-testid": `sort-${name}`, onclick: () => update({ sort: next }) }, label + (on ? (down ? " ↓" : " ↑") : "")));
  };
  const table = $("table");
  keepingFocus(table, () => { table.tHead.replaceChildren(el("tr", {}, column("head", "head", "layer:number"), anyKind ? column("kind", "kind", "lookup or average") : null,
    anySentence ? el("th", { scope: "col", className: "left", title: "Empty if nothing stands out" }, "what it does") : null, names.map((n) => column(n, figures[figureAt[n]].label, figures[figureAt[n]].words))));
  table.tBodies[0].replaceChildren(...rows.map((h) => {
    const swatch = el("span", { className: "swatch" });
    swatch.style.background = layerColour(h.layer);
    return el("tr", { className: h.name === state.head ? "chosen" : "", "data-row": h.index, title: h.sentence || h.name },
      el("td", {}, swatch, el("button", { type: "button", "data-testid": `head-${h.index}`, title: h.name, "aria-label": saidOf(h) }, breakable(h.short))),
      anyKind ? el("td", { className: "left" }, h.kind) : null,
      anySentence ? el("td", { className: "what", title: h.sentence }, el("span", { "data-testid": `what-${h.index}` }, h.sentence)) : null,
      names.map((n) => el("td", { className: "figure" }, withNull(h, figureAt[n]))));
  })); });
  $("shown").textContent = `${rows.length} of ${heads.length} head${heads.length === 1 ? "" : "s"}`;
  $("none").hidden = rows.length > 0;
}

const body = $("table").tBodies[0];
const headOf = (event) => heads[Number(event.target.closest("[data-row]")?.dataset.row)] ?? null;
body.addEventListener("pointerover", (event) => light(headOf(event)));
body.addEventListener("pointerleave", () => light(null));
body.addEventListener("focusin", (event) => light(headOf(event)));
body.addEventListener("click", (event) => { const head = headOf(event); if (head) choose(head); });

// ---- the plane ----

function sized(canvas) {
  const ratio = devicePixelRatio || 1, { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return { pen, width, height };
}

/** An image of n columns from numbers 0 … top, last row first where `up`. */
function image(values, columns, top, { up = false, strength = 1 } = {}) {
  const count = values.length / columns, made = new ImageData(columns, count), table = inks();
  for (let r = 0; r < count; r += 1) {
    for (let c = 0; c < columns; c += 1) made.data.set([...table[Math.round((255 * strength * values[r * columns + c]) / top)], 255], 4 * ((up ? count - 1 - r : r) * columns + c));
  }
  const canvas = el("canvas", { width: columns, height: count });
  canvas.getContext("2d").putImageData(made, 0, 0);
  return canvas;
}

/** Colours of the queries: one for each of the fullest cells, one more for the rest. */
function dotColours(detail) {
  const count = new Map();
  for (const key of detail.cell) count.set(key, (count.get(key) ?? 0) + 1);
  const { series, accent, soft } = theme(), colours = [accent, ...series.slice(2, -1)];
  const fullest = [...count].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, colours.length).map(([key]) => key);
  const chosen = new Map(fullest.map((key, k) => [key, colours[k]]));
  return (key) => chosen.get(key) ?? soft;
}

const STEPS = 4095;

function drawPlane(canvas, detail, { dot = 3, line = 0.7, query = -1, cell = -1 } = {}) {
  const { pen, width, height } = sized(canvas), side = Math.sqrt(detail.shade.length);
  const x = (v) => (v / STEPS) * width, y = (v) => (1 - v / STEPS) * height;
  pen.imageSmoothingQuality = "high";
  pen.drawImage(image(detail.shade, side, 63, { up: true, strength: 0.8 }), 0, 0, width, height);
  const outline = (first, size) => {
    pen.beginPath();
    for (let k = first; k < first + size; k += 1) pen.lineTo(x(detail.corners[2 * k]), y(detail.corners[2 * k + 1]));
    pen.closePath();
  };
  pen.strokeStyle = theme().ink;
  pen.lineWidth = line;
  let first = 0, own = null;
  detail.shapeSize.forEach((size, k) => {
    outline(first, size);
    pen.stroke();
    if (detail.shapeKey[k] === cell) own = [first, size];
    first += size;
  });
  if (own) {
    outline(...own);
    pen.strokeStyle = theme().accent;
    pen.lineWidth = 2.5;
    pen.stroke();
  }
  const colour = dotColours(detail);
  for (let q = 0; q < detail.x.length; q += 1) {
    pen.beginPath();
    pen.arc(x(detail.x[q]), y(detail.y[q]), dot, 0, 2 * Math.PI);
    pen.fillStyle = colour(detail.cell[q]);
    pen.fill();
    if (dot > 2) {
      pen.strokeStyle = theme().background;
      pen.lineWidth = 0.6;
      pen.stroke();
    }
  }
  if (query >= 0) {
    pen.beginPath();
    pen.arc(x(detail.x[query]), y(detail.y[query]), 8, 0, 2 * Math.PI);
    pen.strokeStyle = theme().accent;
    pen.lineWidth = 2.5;
    pen.stroke();
  }
}

/** The key whose polygon holds a point of the plane, or −1. */
function cellAt(detail, px, py) {
  let first = 0;
  for (let k = 0; k < detail.shapeSize.length; k += 1) {
    const size = detail.shapeSize[k];
    let inside = size > 2, sign = 0;
    for (let i = 0; i < size && inside; i += 1) {
      const a = 2 * (first + i), b = 2 * (first + ((i + 1) % size)), c = detail.corners;
      const cross = (c[b] - c[a]) * (py - c[a + 1]) - (c[b + 1] - c[a + 1]) * (px - c[a]);
      if (cross !== 0) { if (sign !== 0 && Math.sign(cross) !== sign) inside = false; sign = Math.sign(cross); }
    }
    if (inside) return detail.shapeKey[k];
    first += size;
  }
  return -1;
}

// ---- the pattern ----

const BLOCKS = 64;
const LABELLED = 32;

function blocksOf(detail) {
  const down = Math.ceil(detail.x.length / BLOCKS), across = Math.ceil(detail.keys / BLOCKS);
  return { down, across, rows: Math.ceil(detail.x.length / down), columns: Math.ceil(detail.keys / across) };
}

const LABEL = 10.5, LINE = 13; // pixels: the font of labels, and the least distance between two of them
const labelled = new WeakMap();

/** The labels of all rows and columns of a pattern: tokens where there are few, positions otherwise. */
function labelsOf(detail) {
  if (labelled.has(detail)) return labelled.get(detail);
  const { down, across, rows: r, columns: c } = blocksOf(detail), tokens = tokensOf(detail);
  const words = r <= LABELLED && c <= LABELLED && (detail.queryTokens || detail.keyTokens);
  const cut = (text) => (text.length > 9 ? `${text.slice(0, 8)}…` : text);
  const label = (known, place) => (words && known ? cut(visible(tokens[place])) : String(place));
  const rows = Array.from({ length: r }, (_, k) => label(detail.queryTokens, detail.position[k * down]));
  const columns = Array.from({ length: c }, (_, k) => label(detail.keyTokens, k * across));
  const [wide, deep] = [rows, columns].map((all) => Math.ceil(Math.max(...all.map((text) => widthOf(text, LABEL)))));
  const found = { words, rows, columns, left: wide + 7, bottom: words ? deep + 6 : 18, apart: words ? LINE : deep + 8 };
  labelled.set(detail, found);
  return found;
}

function patternBox(detail, width, height) {
  const { rows: r, columns: c } = blocksOf(detail), { left, bottom } = labelsOf(detail);
  return { left, top: 2, width: width - left - 2, height: height - bottom - 2, rows: r, columns: c };
}

function drawPattern(canvas, detail, query = -1) {
  const { pen, width, height } = sized(canvas), box = patternBox(detail, width, height), { down } = blocksOf(detail), labels = labelsOf(detail);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image(detail.pattern, box.columns, 255), box.left, box.top, box.width, box.height);
  pen.strokeStyle = theme().rule;
  pen.strokeRect(box.left, box.top, box.width, box.height);
  pen.fillStyle = theme().muted;
  pen.font = fontOf(LABEL);
  const usual = labels.words ? 1 : 8, every = (cell, apart) => usual * Math.max(1, Math.ceil(apart / (usual * cell))); // so that none overlap
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (let r = 0, step = every(box.height / box.rows, LINE); r < box.rows; r += step) {
    pen.fillText(labels.rows[r], box.left - 4, box.top + ((r + 0.5) / box.rows) * box.height);
  }
  pen.textAlign = labels.words ? "right" : "center";
  for (let c = 0, step = every(box.width / box.columns, labels.apart); c < box.columns; c += step) {
    pen.save();
    pen.translate(box.left + ((c + 0.5) / box.columns) * box.width, box.top + box.height + 4);
    if (labels.words) pen.rotate(-Math.PI / 2);
    pen.fillText(labels.columns[c], 0, labels.words ? 0 : 7);
    pen.restore();
  }
  if (query >= 0) {
    const r = Math.floor(query / down);
    pen.strokeStyle = theme().accent;
    pen.lineWidth = 2;
    pen.strokeRect(box.left, box.top + (r / box.rows) * box.height, box.width, Math.max(2, box.height / box.rows));
  }
}

// ---- the chosen head ----

const tokensOf = (detail) => data.tokens[detail.sequence] ?? [];
const queryName = (detail, q) => named("query", detail.position[q], detail.queryTokens && tokensOf(detail)[detail.position[q]]);
const keyName = (detail, key) => named("key", key, detail.keyTokens && tokensOf(detail)[key]);

function named(what, place, token) {
  return typeof token === "string" ? el("span", {}, `${what} ${place} `, tokenOf(token)) : el("span", {}, `${what} ${place}`);
}

let redraw = () => {}; // the canvases of the panel

async function drawDetail() {
  const panel = $("detail"), head = headNamed.get(state.head);
  if (!head) return drawOverview(panel);
  const detail = await detailOf(head);
  if (state.head !== head.name) return; // another head was chosen meanwhile
  const at = rows.indexOf(head), other = (step) => rowBeside(at, step);
  const button = (label, id, words, target) => el("button", { type: "button", className: "quiet", "data-testid": id, title: words, "aria-label": words, disabled: !target, onclick: () => choose(target) }, label);
  const top = el("div", { className: "card" },
    el("div", { className: "head-top" },
      el("h2", { "data-testid": "head-name" }, head.name), head.kind ? el("span", { className: "kind", "data-testid": "kind" }, head.kind) : null,
      el("span", { className: "buttons" }, button("↑", "previous", "The head before it in the table", other(-1)), button("↓", "next", "The next head in the table", other(1)),
        el("button", { type: "button", className: "quiet", "data-testid": "close", onclick: () => choose(null) }, "All heads"))),
    head.sentence ? el("p", { className: "sentence", "data-testid": "sentence" }, head.sentence) : null,
    el("p", { className: "note" }, head.about));
  const cards = el("div", { className: "cards" });
  keepingFocus(panel, () => panel.replaceChildren(top, cards));
  redraw = () => { for (const canvas of cards.querySelectorAll("canvas.strip")) drawStrip(canvas); };
  if (detail) drawn(cards, head, detail);
  else top.append(el("p", { className: "note" }, "This head was read while the model ran, without keeping its queries and keys, so there is no plane and no pattern."));
  if (head.audit) cards.append(auditCard(head));
  if (detail) cards.append(...listCards(detail));
  cards.append(figuresCard(head));
  redraw();
}

/** The plane, the pattern and one query of it. */
function drawn(cards, head, detail) {
  const plane = el("canvas", { className: "square", "data-testid": "plane", role: "img", "aria-label": `The ${detail.named}: ${detail.shapeSize.length} cells in the window and ${detail.x.length} queries` });
  const pattern = el("canvas", { className: "square", "data-testid": "pattern", role: "img", "aria-label": `Attention pattern of ${detail.x.length} queries on ${detail.keys} keys` });
  const planeSaid = el("p", { className: "said", "data-testid": "plane-said" }), patternSaid = el("p", { className: "said", "data-testid": "pattern-said" });
  const { down, across, columns, rows: count } = blocksOf(detail), tokens = tokensOf(detail);
  const planeWords = `The ${detail.named}; ${Math.round(100 * detail.held)}% of their variance lies in it. Lines: cells of the keys. The stronger the shade, the clearer the winner. Dots: queries, in the colours of their cells in the whole space.`;
  const patternWords = down * across === 1 ? "Weights of the queries (rows) on the keys (columns), on a square-root scale." : `Blocks of ${down} queries (rows) by ${across} keys (columns): their share of the weight, on a square-root scale.`;
  planeSaid.textContent = planeWords;
  patternSaid.textContent = patternWords;
  const chosen = () => { const q = detail.position.indexOf(Number(state.query)); return state.query !== "" && q >= 0 ? q : -1; };

  const number = el("input", { type: "number", id: "query", min: detail.position[0], max: detail.position.at(-1), step: 1, value: state.query, "data-testid": "query" });
  const slider = el("input", { type: "range", min: 0, max: detail.x.length - 1, step: 1, value: Math.max(0, chosen()), "data-testid": "query-slider", "aria-label": "Query" });
  const said = el("div", { "data-testid": "query-said" });
  const pick = (q) => update({ query: q < 0 ? "" : String(detail.position[q]) });
  number.oninput = () => { if (number.value === "" || detail.position.includes(Number(number.value))) update({ query: number.value }); };
  number.onchange = () => { number.value = chosen() < 0 ? "" : state.query; };
  slider.oninput = () => pick(Number(slider.value));

  const pointer = (event, canvas) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top, box.width, box.height]; };
  const queryAt = (event) => {
    const [x, y, width, height] = pointer(event, plane);
    let best = -1, least = 14 ** 2;
    for (let q = 0; q < detail.x.length; q += 1) {
      const away = ((detail.x[q] / STEPS) * width - x) ** 2 + ((1 - detail.y[q] / STEPS) * height - y) ** 2;
      if (away < least) [best, least] = [q, away];
    }
    return best;
  };
  plane.onpointermove = (event) => {
    const [x, y, width, height] = pointer(event, plane), key = cellAt(detail, (x / width) * STEPS, (1 - y / height) * STEPS), q = queryAt(event);
    planeSaid.replaceChildren(...(key < 0 ? [] : ["This is the cell of ", keyName(detail, key), ". "]), ...(q < 0 ? [] : sayQuery(detail, q)));
  };
  plane.onpointerleave = () => { planeSaid.textContent = planeWords; };
  plane.onclick = (event) => pick(queryAt(event));
  const blockAt = (event) => {
    const [x, y, width, height] = pointer(event, pattern), box = patternBox(detail, width, height);
    const r = Math.floor(((y - box.top) / box.height) * count), c = Math.floor(((x - box.left) / box.width) * columns);
    return r >= 0 && r < count && c >= 0 && c < columns ? [r, c] : null;
  };
  pattern.onpointermove = (event) => {
    const block = blockAt(event);
    if (!block) { patternSaid.textContent = patternWords; return; }
    const [r, c] = block, weight = weightOf((detail.pattern[r * columns + c] / 255) ** 2);
    const last = (first, size, end) => Math.min(first + size, end) - 1;
    if (down * across === 1) patternSaid.replaceChildren(queryName(detail, r), " → ", keyName(detail, c), `: ${weight}`);
    else patternSaid.replaceChildren(`queries ${detail.position[r * down]}–${detail.position[last(r * down, down, detail.x.length)]} on keys ${c * across}–${last(c * across, across, detail.keys)}: ${weight} of their weight`);
  };
  pattern.onpointerleave = () => { patternSaid.textContent = patternWords; };
  pattern.onclick = (event) => { const block = blockAt(event); if (block) pick(block[0] * down); };

  const thinned = detail.x.length < detail.queries ? ` ${detail.x.length} of its ${detail.queries} queries are drawn.` : "";
  const where = head.sequences > 1 ? ` of sequence ${detail.sequence}` : "";
  cards.append(
    el("div", { className: "card" }, el("h3", {}, `Plane${where}`), plane, planeSaid, thinned ? el("p", { className: "note" }, thinned) : null),
    el("div", { className: "card" }, el("h3", {}, `Attention pattern${where}`), pattern, patternSaid),
    el("div", { className: "card wide" }, el("div", { className: "query-line" }, el("label", { htmlFor: "query" }, el("b", {}, "Query")), number, slider), said));

  redraw = () => {
    const q = chosen();
    drawPlane(plane, detail, { query: q, cell: q < 0 ? -1 : detail.cell[q] });
    drawPattern(pattern, detail, q);
    for (const canvas of cards.querySelectorAll("canvas.strip")) drawStrip(canvas);
    if (document.activeElement !== number) number.value = q < 0 ? "" : state.query;
    slider.value = Math.max(0, q);
    if (q < 0) { said.replaceChildren(el("p", { className: "note" }, "Choose a query: click on a dot or on a row of the pattern, or move the slider.")); return; }
    const most = detail.weight.length / detail.x.length, bars = el("div", { className: "bars" });
    const bar = (name, weight, number) => {
      const fill = el("div", { className: "fill" });
      fill.style.width = `${100 * weight}%`;
      bars.append(name, el("div", { className: "track" }, fill), el("span", { className: "number" }, number));
    };
    let rest = 1;
    for (let k = 0; k < most; k += 1) {
      const key = k ? detail.moreKey[q * (most - 1) + k - 1] : detail.cell[q], weight = detail.weight[q * most + k];
      if (weight === 0) continue;
      rest -= weight;
      bar(keyName(detail, key), weight, Number.isFinite(detail.margin[q]) ? weightOf(weight) : "1");
    }
    if (rest >= 0.005 && detail.keys > most) bar(el("span", { "data-testid": "other-keys" }, "all other keys"), rest, weightOf(Number(rest.toFixed(2))));
    const place = detail.position[q], near = detail.queryTokens ? el("p", { className: "said" }, contextOf([tokens.slice(Math.max(0, place - 12), place), tokens[place], tokens.slice(place + 1, place + 13)], `query ${place}`)) : null;
    said.replaceChildren(el("p", { className: "said" }, ...sayQuery(detail, q)), ...(near ? [near] : []), bars);
  };
}

/** A weight in two digits; it is known to 0.4 % only. */
const weightOf = (weight) => (weight >= 0.99 ? ">0.99" : short(weight, 2));

function sayQuery(detail, q) {
  const margin = Number.isFinite(detail.margin[q]) ? `margin ${short(detail.margin[q])} nats` : "it sees no other key";
  return [queryName(detail, q), " is in the cell of ", keyName(detail, detail.cell[q]), `: ${margin}, leakage ${short(detail.leakage[q])}.`];
}

function listCards(detail) {
  const many = detail.sequences.length > 0;
  const table = (id, columns, lines) => el("table", { className: "lists", "data-testid": id }, el("thead", {}, el("tr", {}, columns.map((c, k) => el("th", { scope: "col", className: k && typeof lines[0]?.[k] === "string" ? "" : "left" }, c)))),
    el("tbody", {}, lines.map((line) => el("tr", {}, line.map((cell) => el("td", { className: typeof cell === "string" ? "number" : "left" }, cell))))));
  const card = (title, words, content, wide = false) => el("div", { className: wide ? "card wide" : "card" }, el("h3", {}, title), content, words ? el("p", { className: "note" }, words) : null);
  const place = (what, row, at) => `${what} ${at}${many ? ` of sequence ${row.sequence}` : ""}`;
  const open = (row, content) => (row.sequence === detail.sequence && detail.position.includes(row.query)
    ? el("button", { type: "button", className: "link", title: "Show this query", onclick: () => { update({ query: String(row.query) }); document.querySelector('[data-testid="query-said"]').closest(".card").scrollIntoView({ block: "center" }); } }, content) : content);
  const where = (text) => el("span", { className: "place" }, text);
  const queries = (list) => list.map((row) => [
    el("span", {}, where(open(row, place("query", row, row.query))), row.queryText ? contextOf(row.queryText, place("query", row, row.query)) : ""),
    el("span", {}, where(`key ${row.key}`), row.keyText ? contextOf(row.keyText, place("key", row, row.key)) : ""), short(row.margin), short(row.leakage)]);
  const drawnOnly = many ? ` Only sequence ${detail.sequence} is drawn, so only its queries are links.` : "";
  const out = [];
  if (detail.decided.length) out.push(card("Clearest queries", `Largest margins among queries that see more than one key.${drawnOnly}`, table("decided", ["query", "goes to", "margin", "leakage"], queries(detail.decided)), true));
  if (detail.cells.length) {
    out.push(card("Fullest cells", "Keys by the number of queries that fall into their cells.", table("cells", ["key", "queries", "margin", "|value|"],
      detail.cells.map((row) => [el("span", {}, where(place("key", row, row.key)), row.text ? contextOf(row.text, place("key", row, row.key)) : ""), String(row.queries), short(row.margin), short(row.value)])), true));
  }
  if (detail.tokens.length) out.push(card("Tokens attended to", "Number of queries in the cells of all keys with this token.", el("p", { className: "chips", "data-testid": "tokens" }, detail.tokens.map(([token, count]) => el("span", {}, tokenOf(token), ` ${count}`))), true));
  if (detail.tied.length) out.push(card("Closest to a tie", drawnOnly.trim(), table("tied", ["query", "goes to", "margin", "leakage"], queries(detail.tied)), true));
  if (many) {
    out.push(card("Sequences with the clearest winners", "Smallest mean leakage first.", table("sequences", ["sequence", "queries", "median margin", "leakage"],
      detail.sequences.map((row) => [el("span", { className: "context" }, `${row.sequence}  ${row.text ? `${row.text.map(visible).join(" ")} …` : ""}`), String(row.queries), short(row.margin), short(row.leakage)])), true));
  }
  return out;
}

function figuresCard(head) {
  const line = (f, k) => {
    const known = heads.map((h) => h.figures[k]).filter((v) => !Number.isNaN(v)), value = head.figures[k];
    const rank = Number.isNaN(value) ? "not defined here" : `rank ${1 + known.filter((v) => v > value).length} of ${known.length}`;
    return el("tr", {}, el("th", { scope: "row", className: "left", title: f.words }, f.label), el("td", {}, withNull(head, k)),
      el("td", {}, el("canvas", { className: "strip", role: "img", title: rank, "aria-label": rank, "data-strip": `${head.index} ${k}` })));
  };
  const lines = figures.map(line), cut = Math.ceil(lines.length / 2);
  return el("div", { className: "card wide" }, el("h3", {}, "Figures"),
    el("div", { className: "strips", "data-testid": "figures" }, [lines.slice(0, cut), lines.slice(cut)].map((part) => el("table", { className: "lists" }, el("tbody", {}, part)))),
    el("p", { className: "note" }, `${anyNull ? "In brackets and as a ring: a random head of the same shape. " : ""}The grey lines are all heads of the model; the coloured bar is this head.`));
}

function drawStrip(canvas) {
  const [index, k] = canvas.dataset.strip.split(" ").map(Number), { pen, width, height } = sized(canvas), head = heads[index];
  const scale = scaleOf(heads.map((h) => h.figures[k]).concat(head.null[k]), false, 5, width - 5), mark = (v, colour, size) => {
    pen.fillStyle = colour;
    pen.fillRect(scale.at(v) - size / 2, 2, size, height - 4);
  };
  pen.globalAlpha = 0.45;
  for (const h of heads) if (scale.takes(h.figures[k])) mark(h.figures[k], theme().soft, 1);
  pen.globalAlpha = 1;
  if (scale.takes(head.null[k])) {
    pen.beginPath();
    pen.arc(scale.at(head.null[k]), height / 2, 3.5, 0, 2 * Math.PI);
    pen.strokeStyle = theme().ink;
    pen.stroke();
  }
  if (scale.takes(head.figures[k])) mark(head.figures[k], theme().accent, 3);
}

// ---- the audit ----

const AUDIT_LINES = [
  { label: "bound (proved)", x: 0, y: 2, colour: "ink" },
  { label: "largest change of the output (measured)", x: 0, y: 3, colour: "accent" },
  { label: "oracle: the most skipped at the same lost mass", x: 1, y: 3, colour: "oracle", dash: "5 4", wide: 4 }, // drawn under the change, because TopK is its own oracle
];

/** Points of the audit are [skipped, oracle, bound, error, mass lost], one per rule; bound and error over the size of the output.
 * Each kind of rule is a curve with its own marks. Zeros are drawn on a line of their own below the logarithmic axis. */
function auditCard(head) {
  const { rules, kinds, skippedNothing } = head.audit, points = head.audit.points.map((p) => p.map((v) => (v === null ? NaN : Number(v))));
  const shown = [...new Set(kinds)].filter((kind) => !(kind === "SkipBlocks" && skippedNothing));
  const drawn = points.flatMap((p, k) => (shown.includes(kinds[k]) ? [{ p, kind: kinds[k], rule: rules[k] }] : []));
  const heights = drawn.flatMap(({ p }) => [p[2], p[3]]), zeros = heights.includes(0), unbounded = drawn.filter(({ p }) => p[2] === Infinity).length;
  const card = el("div", { className: "card wide", "data-testid": "audit" }, el("h3", {}, "Audit: what skipping keys costs"));
  if (skippedNothing) card.append(el("p", { className: "said", "data-testid": "skipped-nothing" }, skippedNothing));
  if (drawn.length) card.append(...auditCurves(drawn, shown, zeros));
  const notes = ["Shares are means over queries; bound, change and mass are the largest of any query. The oracle skips as much as any rule could at the same lost mass."];
  if (drawn.length && zeros) notes.push("Points on the line 0 change nothing.");
  if (unbounded) notes.push(`${unbounded} ${unbounded === 1 ? "bound is" : "bounds are"} infinite and not shown.`);
  card.append(el("p", { className: "note" }, notes.join(" ")), auditNumbers(rules, points));
  return card;
}

function auditCurves(drawn, kinds, zeros) {
  const { series, ink, accent } = theme(), colours = { ink, accent, oracle: series[2] };
  const width = Math.min(640, Math.max(300, $("detail").clientWidth - 30)), height = 250, box = { left: 60, right: width - 12, top: 22, bottom: height - 36 }, floor = box.bottom - 6;
  const xs = scaleOf([0, 0.05, ...drawn.flatMap(({ p }) => [p[0], p[1]])], false, box.left, box.right);
  const ys = scaleOf(drawn.flatMap(({ p }) => [p[2], p[3]]), true, box.bottom - (zeros ? 24 : 0), box.top);
  if (!drawn.some(({ p }) => ys.takes(p[2]) || ys.takes(p[3]))) ys.ticks = []; // zeros only
  const up = (v) => (v === 0 ? floor : ys.at(v));
  const picture = svg("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": "Bound and error against the share skipped; the table below holds the numbers" });
  picture.append(axesOf(xs, ys, { ...box, xName: "share skipped", yName: `change / size of the output (log${zeros ? "; below the gap: 0" : ""})` }));
  if (zeros) picture.append(
    svg("rect", { class: "gap", x: box.left - 4, y: floor - 14, width: box.right - box.left + 8, height: 5 }),
    ...[floor - 14, floor - 9].map((y) => svg("line", { class: "break", x1: box.left - 6, x2: box.left + 6, y1: y + 2, y2: y - 2 })),
    svg("line", { class: "grid", x1: box.left, x2: box.right, y1: floor, y2: floor, "stroke-dasharray": "2 3" }), svg("text", { class: "zero", x: box.left - 5, y: floor + 4, "text-anchor": "end" }, "0"));
  const mark = (x, y, kind, colour) => (kinds.indexOf(kind) % 2 ? svg("rect", { x: x - 3, y: y - 3, width: 6, height: 6, fill: colour }) : svg("circle", { cx: x, cy: y, r: 3.2, fill: colour }));
  const key = el("p", { className: "key-line" });
  for (const { label, x, y, colour: name, dash = "", wide = 1.8 } of AUDIT_LINES.toReversed()) {
    const colour = colours[name];
    for (const kind of kinds) {
      const placed = drawn.filter((d) => d.kind === kind && xs.takes(d.p[x]) && (d.p[y] === 0 || ys.takes(d.p[y]))).map((d) => ({ x: xs.at(d.p[x]), y: up(d.p[y]), rule: d.rule }));
      if (!placed.length) continue;
      picture.append(svg("polyline", { points: placed.map((p) => `${p.x},${p.y}`).join(" "), fill: "none", stroke: colour, "stroke-width": wide, "stroke-dasharray": dash }));
      for (const p of placed) { const dot = mark(p.x, p.y, kind, colour); dot.append(svg("title", {}, p.rule)); picture.append(dot); }
    }
    key.prepend(el("span", {}, svg("svg", { width: 28, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 28, y1: 5, y2: 5, stroke: colour, "stroke-width": wide, "stroke-dasharray": dash })), label));
  }
  for (const kind of kinds) key.append(el("span", {}, svg("svg", { width: 10, height: 10, "aria-hidden": "true" }, mark(5, 5, kind, theme().muted)), kind));
  return [picture, key];
}

function auditNumbers(rules, points) {
  const percent = (v) => `${short(100 * v)}%`, columns = ["rule", "skipped", "oracle", "bound", "error", "mass lost"];
  return el("details", {}, el("summary", { className: "note" }, "The numbers"), el("table", { className: "lists", "data-testid": "audit-table" }, el("thead", {}, el("tr", {}, columns.map((c, k) => el("th", { scope: "col", className: k ? "" : "left" }, c)))),
    el("tbody", {}, points.map((p, k) => el("tr", {}, el("td", { className: "left" }, rules[k]), el("td", {}, percent(p[0])), el("td", {}, percent(p[1])), ...p.slice(2).map((v) => el("td", {}, short(v))))))));
}

// ---- overview ----

let watcher = null;

function drawOverview(panel) {
  const numbersHere = [...new Set(heads.map((h) => h.head))].sort((a, b) => a - b), k = figureAt[state.y], kept = new Set(rows);
  const scale = scaleOf(heads.map((h) => h.figures[k]), state.logy, 0, 1), at = (v) => (scale.takes(v) ? inkAt(0.08 + 0.9 * scale.at(v)) : null);
  const grid = el("div", { className: "planes", "data-testid": "planes" }, el("span"), numbersHere.map((n) => el("span", { className: "column-name" }, String(n))));
  grid.style.gridTemplateColumns = `max-content repeat(${numbersHere.length}, minmax(44px, 120px))`;
  data.layers.forEach((layer, row) => {
    const here = new Map(heads.filter((h) => h.layer === row).map((h) => [h.head, h]));
    grid.append(el("span", { className: "row-name", title: layer.name }, breakable(shortLayers[row])));
    for (const n of numbersHere) {
      const head = here.get(n);
      if (!head) { grid.append(el("span")); continue; }
      const strip = el("i"), colour = at(head.figures[k]);
      if (colour) strip.style.background = css(colour);
      grid.append(el("button", { type: "button", className: kept.has(head) ? "" : "out", title: `${saidOf(head)}${head.sentence ? `. ${head.sentence}` : ""}`, "aria-label": saidOf(head), "data-plane": head.index, "data-testid": `plane-${head.index}`,
        onclick: () => choose(head), onpointerenter: () => light(head), onpointerleave: () => light(null), onfocus: () => light(head) }, head.detail ? el("canvas", { "data-thumb": head.index }) : null, strip));
    }
  });
  const ramp = el("span", { className: "ramp", "aria-hidden": "true" });
  ramp.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map((t) => css(inkAt(0.08 + 0.9 * t))).join(", ")})`;
  const names = [...new Set([state.y, state.x, ...USUAL])].filter(has);
  const layers = el("table", { className: "lists", "data-testid": "layers" }, el("thead", {}, el("tr", {}, el("th", { scope: "col", className: "left" }, "layer"), names.map((n) => el("th", { scope: "col", title: figures[figureAt[n]].words }, figures[figureAt[n]].label)))),
    el("tbody", {}, data.layers.map((layer) => el("tr", {}, el("td", { className: "left" }, layer.name), names.map((n) => el("td", {}, withNull(layer, figureAt[n])))))));
  const drawn = heads.some((h) => h.detail);
  const cells = drawn ? "Each key has a cell: where its score is the largest. The stronger the shade, the clearer the winner; dots are queries, in the colours of their cells. " : "";
  const overview = el("div", { className: "overview" },
    el("div", { className: "card" }, el("h3", {}, drawn ? "Every head on the principal plane of its queries" : "Every head"), grid,
      el("p", { className: "note" }, `A row per layer, a column per head. ${cells}Click on a head for its panel. ${drawn ? "The bar beneath each shows " : "Shaded by "}`, figures[k].label, ramp, "from small to large.")),
    el("div", { className: "card" }, el("h3", {}, "Layers"), el("div", { className: "sideways" }, layers), el("p", { className: "note" }, `Counts are summed over the heads of a layer, other figures are averaged. ${anyNull ? "In brackets: random heads of the same shapes. " : ""}`, data.note)));
  panel.replaceChildren(overview);
  watcher?.disconnect();
  watcher = new IntersectionObserver((entries) => { for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); thumb(entry.target); } });
  for (const canvas of grid.querySelectorAll("canvas")) watcher.observe(canvas);
  redraw = () => { for (const canvas of grid.querySelectorAll("canvas[data-done]")) thumb(canvas); };
}

async function thumb(canvas) {
  const detail = await detailOf(heads[Number(canvas.dataset.thumb)]);
  if (!detail || !canvas.isConnected) return;
  drawPlane(canvas, detail, { dot: 1.1, line: 0.35 });
  canvas.dataset.done = "1";
}

// ---- everything ----

/** Draw what depends on the parts of the state that changed. */
function show(changed) {
  const some = (...names) => changed.some((name) => names.includes(name));
  const filters = some("filter", "by", "low", "high"), axes = some("x", "y", "logx", "logy", "nulls", "names");
  if (filters || some("sort") || !rows.length) rows = sorted(heads.filter(passes));
  if (filters || axes) drawScatter();
  else if (some("head")) drawMarks();
  if (filters || some("x", "y", "sort", "every", "head")) drawTable();
  for (const id of ["x", "y", "by", "low", "high", "filter"]) if ($(id).value !== state[id]) $(id).value = state[id];
  for (const id of ["logx", "logy", "nulls", "names", "every"]) $(id).checked = state[id];
  for (const id of ["low", "high"]) Object.assign($(id), { disabled: !state.by, title: state.by ? "" : "Choose a figure first" });
  for (const id of ["x", "y"]) $(id).title = figures[figureAt[state[id]]].words;
  if (some("head")) return drawDetail();
  if (!state.head && (filters || some("x", "y", "logy"))) return drawDetail();
  if (some("query")) redraw();
  else if (state.head && (filters || some("sort"))) neighbours();
  return undefined;
}

/** The head before or after a row; where the open head is not in the table (−1), the first row comes after it. */
const rowBeside = (at, step) => (at < 0 && step < 0 ? undefined : rows[at + step]);

/** Buttons to the heads before and after it, when the table has changed. */
function neighbours() {
  const at = rows.indexOf(headNamed.get(state.head));
  for (const [id, step] of [["previous", -1], ["next", 1]]) {
    const button = document.querySelector(`[data-testid="${id}"]`), target = rowBeside(at, step);
    if (button) Object.assign(button, { disabled: !target, onclick: () => choose(target) });
  }
}

for (const node of [$("nulls").closest("label"), $("bracketed")]) node.hidden = !anyNull;
for (const id of ["x", "y", "by"]) {
  $(id).append(...(id === "by" ? [el("option", { value: "" }, "choose a figure")] : []), ...figures.map((f) => el("option", { value: f.name, title: f.words }, f.label)));
  $(id).onchange = () => update({ [id]: $(id).value });
}
for (const id of ["filter", "low", "high"]) $(id).oninput = () => update({ [id]: $(id).value });
for (const id of ["logx", "logy", "nulls", "names", "every"]) $(id).onchange = () => update({ [id]: $(id).checked });
$("swap").onclick = () => update({ x: state.y, y: state.x, logx: state.logy, logy: state.logx });
$("reset").onclick = () => update(Object.fromEntries(["filter", "by", "low", "high", "sort", "every"].map((key) => [key, DEFAULTS[key]])), { push: true });
$("skip").onclick = (event) => { event.preventDefault(); $("detail").focus(); }; // the address after # holds the state

const whole = () => { drawLegend(); rows = []; return show(Object.keys(DEFAULTS)); };
addEventListener("popstate", () => { state = read(); whole(); });
addEventListener("hashchange", () => { state = read(); whole(); });
dark.addEventListener("change", whole);
addEventListener("beforeprint", () => { printing = true; drawLegend(); drawScatter(); redraw(); });
addEventListener("afterprint", () => { printing = false; drawLegend(); drawScatter(); redraw(); });
let width = innerWidth, waiting = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return; // on phones, the address bar changes only the height
  width = innerWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => { drawScatter(); redraw(); });
});
addEventListener("keydown", (event) => { if (event.key === "Escape" && state.head && !event.target.matches('[type="search"], select')) choose(null); });

const ready = Promise.resolve(whole());
window.page = { ready, state: () => state, shown: () => rows.map((h) => h.name), spots: () => spots.map(({ head, x, y }) => ({ name: head.name, x, y })), detail: (name) => detailOf(headNamed.get(name)) };
