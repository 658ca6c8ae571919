/**
 * The playground: keys to drag, the pictures of the head they make, the largest error seen and the proved bound.
 *
 *     mountPlayground(element, studio)  -> {head(), evaluate(point), figures(), ready, painter(), picture, graphs, element}
 *
 * One frame reads the state, builds the head, clips its cells, samples the error and paints. When the state rests (a drag has ended), the
 * samples are refined and the server is asked for a proved bound; an answer that is no longer about the state is dropped.
 */

import { request } from "./frame.js";
import { compileNodes } from "./graph.js";
import { Graph1d } from "./graphs_1d.js";
import { ErrorSearch, cellsOf, evaluate, headOf, valueOf, weights, wireOf } from "./head.js";
import { Picture, shown } from "./picture.js";
import { dimensionOf, freshKeys, rounded } from "./state.js";

/** Name, function, domain. The page without a server has these in gallery.json. */
export const EXAMPLES = [
  ["Waves", "sin(3*x) + x*cos(2*y)", "[-1,1]^2"],
  ["Bump", "exp(-4*(x^2 + y^2))", "[-1,1]^2"],
  ["Saddle", "x^2 - y^2", "[-1,1]^2"],
  ["Kink", "abs(x - y)", "[-1,1]^2"],
  ["Jump", "where(x^2 + y^2 < 0.5, 1, 0)", "[-1,1]^2"],
  ["Ripples", "cos(6*sqrt(x^2 + y^2))", "[-1,1]^2"],
  ["Sine, one variable", "sin(3*x)", "[-1,1]"],
  ["Runge, one variable", "1/(1 + 25*x^2)", "[-1,1]"],
  ["Sinc, one variable", "sin(10*x)/(10*x)", "[-1,1]"],
];

const MOST_KEYS = 256; // that the playground edits; heads from elsewhere may have more
const TOP = 8; // weights shown as bars
const REST = 220; // milliseconds until the state counts as resting
const RATES = [0.5, 5e4]; // ends of the slider, in units of 1/side²

const find = (id) => document.getElementById(id);

export function mountPlayground(element, studio) {
  const { state, server, announce } = studio;
  let loaded = null; // {text, domain, graph, box, dimension, outputs, label, f, search, output}
  let current = null; // {head, cells, seen, at, signature}
  let selected = 0;
  let query = null;
  let proof = { signature: null, result: null, note: "" };
  let asked = null; // the running bound
  let overlayCurves = null;
  let settle = null, reading = null, readingText = null;
  let becomeReady;
  const ready = new Promise((resolve) => { becomeReady = resolve; });

  const work = () => render();
  const actions = {
    work,
    onSelect: (j) => choose(j),
    onMove: (j, point, phase) => moveKey(j, point, phase),
    onStep: (j, by) => stepKey(j, by),
    selected: () => selected,
    onAdd: (point) => addKey(point),
    onRemove: (j) => removeKey(j),
    onHover: (point) => { if (point) { query = point; request(work); } },
    onWheel: (j, steps) => { if (state.get().cells !== "voronoi") { choose(j); changeKey(j, { p: rounded(state.get().keys[j].p + 0.01 * steps * span() ** 2) }, { push: true }); } },
    onValue: (j, point, value, phase) => changeKey(j, { x: point, v: value }, phase === "move" ? { live: true } : { push: true }),
  };
  const tall = (rows) => Math.max(150, Math.floor((innerHeight - 132) / rows) - 62);
  const picture = new Picture(find("picture"), { ...actions, maxSize: (rows) => (innerWidth <= 760 ? 600 : tall(rows)) });
  const graphs = new Graph1d(find("graphs"), { ...actions, maxHeight: (rows) => tall(rows) - 4 });

  // ---- the head of a state -------------------------------------------------------------------------------------------

  const span = () => (loaded ? Math.max(...loaded.box.hi.map((h, i) => h - loaded.box.lo[i])) : 2);

  /** f at a center, moved to the box where it lies outside (a slope of a max-affine function may). */
  function inBox(x) {
    return x.map((c, i) => Math.min(loaded.box.hi[i], Math.max(loaded.box.lo[i], c)));
  }

  /** The gradient of f by central differences, one-sided at an edge of the box or of the set where f is defined. */
  function gradientAt(x) {
    const { f, box } = loaded;
    return x.map((c, i) => {
      const h = 1e-5 * (box.hi[i] - box.lo[i]), up = [...x], down = [...x];
      up[i] = Math.min(c + h, box.hi[i]);
      down[i] = Math.max(c - h, box.lo[i]);
      const g = (f(up) - f(down)) / (up[i] - down[i]);
      return Number.isFinite(g) ? g : 0;
    });
  }

  /** Value and slope of a key: those of f at its center, or its own. */
  function valuesOf(key, now) {
    if (!now.follow || !loaded?.f) return { v: key.v, g: key.g };
    const at = inBox(key.x), v = loaded.f(at), g = now.values === "affine" ? gradientAt(at) : key.x.map(() => 0);
    if (!Number.isFinite(v)) return { v: 0, g: key.x.map(() => 0) };
    return { v: v + (now.values === "affine" ? g.reduce((s, slope, i) => s + slope * (key.x[i] - at[i]), 0) : 0), g };
  }

  function headFor(now) {
    const hard = now.R === "hard", R = hard ? 1 / span() ** 2 : now.R;
    const own = now.keys.map((key) => valuesOf(key, now));
    return headOf({
      rates: now.keys[0].x.map(() => R), centers: now.keys.map((key) => key.x),
      biases: now.cells === "voronoi" ? null : now.keys.map((key) => (R * key.p) / 2),
      values: own.map(({ v }) => v), slopes: now.values === "affine" ? own.map(({ g }) => g) : null,
    }, { hard });
  }

  // ---- one frame -----------------------------------------------------------------------------------------------------

  /** Whether `current` belongs to the state and the function of this moment; a frame may be due. */
  const upToDate = () => Boolean(current && current.now === state.get() && current.loaded === loaded);

  function render() {
    const now = state.get();
    if (!loaded || now.keys[0].x.length !== loaded.dimension || element.hidden) return;
    const flat = loaded.dimension === 1;
    selected = Math.min(selected, now.keys.length - 1);
    if (!upToDate()) {
      const head = headFor(now), cells = cellsOf(head, loaded.box);
      const quick = loaded.search ? loaded.search.coarse(head) : { seen: NaN, at: [] };
      const keep = current?.refined && sameHead(current.head, head) && current.loaded === loaded ? current : null;
      current = { now, loaded, head, cells, seen: keep?.seen ?? quick.seen, at: keep?.at ?? quick.at, refined: Boolean(keep) };
    }
    const { head, cells } = current;
    find("picture").hidden = flat;
    find("graphs").hidden = !flat;
    if (flat) {
      const curves = now.overlay && overlayCurves && loaded.f ? overlayCurves(now.overlay, { f: loaded.f, box: loaded.box }) : [];
      graphs.show({ head, f: loaded.f, box: loaded.box, selected, dead: cells?.dead ?? null, hover: query, curves, canSetValues: !now.follow }, { atOnce: true });
    } else {
      picture.show({
        head, graph: loaded.graph, output: loaded.output, box: loaded.box, panes: now.show, tint: now.tint, selected, mark: now.at, dead: cells?.dead ?? null,
        valueRange: loaded.search?.range, errorRange: current.seen, sampled: loaded.sampled,
      }, { atOnce: true });
    }
    showFigures();
    tellFigures();
    showQuery();
    showKeys();
    becomeReady();
  }

  /** Parts that show figures of their own (the lessons) hear of every head that is drawn. */
  const hearers = new Set();
  const figuresNow = () => ({
    seen: current.seen, seenAt: current.at, refined: current.refined, head: current.head, box: loaded.box, f: loaded.f, now: current.now,
    curves: Object.entries(graphs.differences).map(([label, error]) => ({ label, error })),
  });
  function tellFigures() {
    for (const tell of hearers) tell(figuresNow());
  }
  studio.onFigures = (fn) => {
    hearers.add(fn);
    if (current) fn(figuresNow());
    return () => hearers.delete(fn);
  };

  function sameHead(a, b) {
    const same = (x, y) => x === y || (x && y && x.length === y.length && x.every((v, k) => v === y[k]));
    return a.n === b.n && a.hard === b.hard && ["rates", "centers", "biases", "values", "slopes"].every((part) => same(a[part], b[part]));
  }

  function showFigures() {
    const { seen } = current;
    text("seen", shown(seen, 4));
    find("seen").title = current.at.length ? `at (${current.at.map((x) => shown(x, 6)).join(", ")}), from samples` : "";
    const mine = proof.signature === signature();
    const proved = find("proved");
    proved.classList.toggle("pending", !mine || !proof.result);
    const result = mine ? proof.result : null;
    text("proved-name", result?.kind === "estimated" ? "Estimate, not proved" : "Proved bound");
    text("proved", result ? (Number.isFinite(result.bound) ? `${result.kind === "estimated" ? "≈" : "≤"} ${shown(result.bound, 4)}` : "none") : mine && proof.note ? "—" : server && state.get().R !== "hard" ? "…" : "—");
    text("proved-note", mine || !server ? proof.note : "");
    find("terms").hidden = !result?.terms?.length;
  }

  function text(id, value) {
    const node = find(id);
    if (node.textContent !== value) node.textContent = value;
  }

  /** The query whose weights are shown: under the pointer, or the marked one, or the selected key. */
  function queryNow(m) {
    const { at, keys } = state.get();
    return [query, at].find((point) => point?.length === m) ?? inBox(keys[selected].x);
  }

  const scratch = { size: 0, w: new Float64Array(0), order: [] };
  function showQuery() {
    const { head } = current, at = queryNow(head.m);
    if (scratch.size !== head.n) Object.assign(scratch, { size: head.n, w: new Float64Array(head.n), order: Array.from({ length: head.n }, (_, j) => j) });
    const { w, order } = scratch, winner = weights(head, at[0], at[1] ?? 0, w);
    order.sort((a, b) => w[b] - w[a] || a - b);
    const net = evaluate(head, at[0], at[1] ?? 0), f = loaded.f ? loaded.f(at) : NaN;
    text("query", `At (${at.map((x) => shown(x, 3)).join(", ")}): head ${shown(net, 4)}, f ${shown(f, 4)}, error ${shown(net - f, 3)}`);
    let sum = 0;
    for (let k = 0; k < TOP; k += 1) {
      const row = bars[k], j = order[k];
      row.row.hidden = k >= head.n;
      if (k >= head.n) continue;
      sum += w[j];
      set(row.name, `key ${j + 1}`);
      set(row.number, w[j] < 5e-5 ? (w[j] === 0 ? "0" : w[j].toExponential(0).replace("-", "−")) : w[j].toFixed(4));
      row.fill.style.transform = `scaleX(${w[j].toFixed(4)})`;
    }
    const shownKeys = Math.min(TOP, head.n);
    const rest = head.n > TOP ? `These ${shownKeys} sum to ${sum.toFixed(4)}, all ${head.n} to 1. ` : "They sum to 1. ";
    text("leakage", `${rest}Leakage 1 − w of key ${winner + 1}: ${shown(Math.max(0, 1 - w[winner]), 3)}`);
  }

  const set = (node, value) => { if (node.textContent !== value) node.textContent = value; };
  const bars = Array.from({ length: TOP }, () => {
    const row = document.createElement("tr"), name = document.createElement("td"), middle = document.createElement("td"), number = document.createElement("td");
    const track = document.createElement("div"), fill = document.createElement("div");
    track.className = "track";
    fill.className = "fill";
    track.append(fill);
    middle.append(track);
    row.append(name, middle, number);
    find("bars").append(row);
    return { row, name, fill, number };
  });

  // ---- keys ----------------------------------------------------------------------------------------------------------

  function choose(j) {
    if (j === selected) return;
    selected = j;
    const { x } = state.get().keys[j];
    query = inBox(x);
    announce(`Key ${j + 1} at ${x.map((c) => shown(c, 3)).join(", ")}${current?.cells?.dead[j] ? ", dead" : ""}.`);
    request(work);
  }

  function changeKey(j, patch, how) {
    const keys = state.get().keys.map((key, k) => (k === j ? { ...key, ...patch } : key));
    state.update({ keys }, how);
  }

  function moveKey(j, point, phase) {
    selected = j;
    changeKey(j, { x: point }, phase === "move" ? { live: true } : { push: true });
  }

  /** One press of an arrow key; a run of them is one entry of the history. */
  let keyRun = null;
  function stepKey(j, by) {
    const { lo, hi } = loaded.box;
    const x = state.get().keys[j].x.map((c, i) => rounded(Math.min(hi[i], Math.max(lo[i], c + by[i]))));
    selected = j;
    changeKey(j, { x }, keyRun ? {} : { push: true });
    clearTimeout(keyRun);
    keyRun = setTimeout(() => { keyRun = null; announce(`Key ${j + 1} at ${x.map((c) => shown(c, 3)).join(", ")}. Largest error seen ${shown(current.seen, 3)}.`); }, 700);
  }

  /** A new key at a point, or where the error is largest; its own value is that of f. */
  function addKey(point) {
    const now = state.get();
    if (!loaded) return;
    if (now.keys.length >= MOST_KEYS) { announce(`The playground edits at most ${MOST_KEYS} keys.`); return; }
    const x = (point ?? (current?.at.length ? current.at : loaded.box.lo.map((l, i) => (l + loaded.box.hi[i]) / 2))).map(rounded);
    const { v, g } = valuesOf({ x, v: 0, g: x.map(() => 0) }, { ...now, follow: true });
    selected = now.keys.length;
    query = x;
    state.update({ keys: [...now.keys, { x, p: 0, v: rounded(v), g: g.map(rounded) }] }, { push: true });
    announce(`Added key ${selected + 1}.`);
  }

  function removeKey(j) {
    const { keys } = state.get();
    if (keys.length === 1) { announce("A head needs at least one key; the last one cannot be removed."); return; }
    selected = Math.max(0, Math.min(j, keys.length - 2));
    state.update({ keys: keys.filter((_, k) => k !== j) }, { push: true });
    announce(`Removed key ${j + 1}.`);
  }

  let fieldsFor = null;
  const fields = new Map();
  /** The numbers of the selected key as labelled fields; they are rebuilt when other fields are needed. */
  function showKeys() {
    const now = state.get(), key = now.keys[selected], flat = loaded.dimension === 1;
    const kind = JSON.stringify([now.cells, now.values, now.follow, loaded.dimension, span()]);
    if (kind !== fieldsFor) { fieldsFor = kind; buildFields(now, flat); }
    for (const { input, get } of fields.values()) {
      if (input === document.activeElement && input.type === "number" && input.dataset.typing) continue;
      const value = String(get(key, valuesOf(key, now)));
      if (input.value !== value) input.value = value;
    }
    const dead = current.cells?.dead;
    text("key-title", `Key ${selected + 1} of ${now.keys.length}${dead?.[selected] ? " (dead)" : ""}`);
    find("remove").disabled = now.keys.length === 1;
    const list = find("keys");
    while (list.children.length > now.keys.length) list.lastChild.remove();
    while (list.children.length < now.keys.length) {
      const option = document.createElement("div");
      option.setAttribute("role", "option");
      option.dataset.testid = `key-${list.children.length + 1}`;
      list.append(option);
    }
    for (let j = 0; j < now.keys.length; j += 1) {
      const option = list.children[j];
      set(option, `${j + 1}: ${now.keys[j].x.map((c) => shown(c, 3)).join(", ")}${dead?.[j] ? " dead" : ""}`);
      if (option.ariaSelected !== String(j === selected)) {
        option.ariaSelected = String(j === selected);
        option.tabIndex = j === selected ? 0 : -1;
      }
      option.classList.toggle("dead", Boolean(dead?.[j]));
    }
  }

  function buildFields(now, flat) {
    const place = find("key-fields"), side = span();
    fields.clear();
    place.replaceChildren();
    const axis = flat ? ["x"] : ["x", "y"];
    const replaced = (list, i, value) => list.map((old, k) => (k === i ? value : old));
    const offset = (key) => (key.p - key.x.reduce((s, c) => s + c * c, 0)) / 2;
    const power = (x, b) => rounded(2 * b + x.reduce((s, c) => s + c * c, 0));
    const field = (name, label, get, put, { step = 0.01, readOnly = false } = {}) => {
      const input = addField(place, name, label, { type: "number", step: rounded(step) });
      input.readOnly = readOnly;
      fields.set(name, { input, get });
      input.addEventListener("input", () => { input.dataset.typing = "1"; const value = input.valueAsNumber; if (Number.isFinite(value) && !readOnly) changeKey(selected, put(state.get().keys[selected], value), { live: true }); });
      input.addEventListener("change", () => { delete input.dataset.typing; state.update({}, { push: true }); });
      input.addEventListener("blur", () => { delete input.dataset.typing; request(work); });
    };
    if (now.cells === "affine") {
      axis.forEach((name, i) => field(`slope-${name}`, `slope in ${name}`, (key) => rounded(key.x[i]), (key, value) => { const x = replaced(key.x, i, value); return { x, p: power(x, offset(key)) }; }, { step: side / 200 }));
      field("offset", "offset", (key) => rounded(offset(key)), (key, value) => ({ p: power(key.x, value) }), { step: side ** 2 / 400 });
    } else {
      axis.forEach((name, i) => field(`center-${name}`, `center ${name}`, (key) => rounded(key.x[i]), (key, value) => ({ x: replaced(key.x, i, value) }), { step: side / 200 }));
      if (now.cells === "power") {
        field("power", "power", (key) => rounded(key.p), (key, value) => ({ p: value }), { step: side ** 2 / 400 });
        const slider = addField(place, "power-slider", "power, by slider", { type: "range", min: -(side ** 2) / 4, max: side ** 2 / 4, step: side ** 2 / 2000 });
        slider.parentElement.classList.add("wide");
        fields.set("power-slider", { input: slider, get: (key) => key.p });
        slider.addEventListener("input", () => changeKey(selected, { p: rounded(Number(slider.value)) }, { live: true }));
        slider.addEventListener("change", () => state.update({}, { push: true }));
      }
    }
    const readOnly = now.follow;
    field("value", readOnly ? "value of f" : "value", (key, own) => rounded(own.v), (key, v) => ({ v }), { readOnly });
    if (now.values === "affine") axis.forEach((name, i) => field(`value-slope-${name}`, `value's slope in ${name}`, (key, own) => rounded(own.g[i]), (key, value) => ({ g: replaced(key.g, i, value) }), { readOnly }));
  }

  function addField(place, name, label, attributes) {
    const wrap = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, attributes);
    if (attributes.type === "number") input.step = "any";
    input.dataset.testid = `field-${name}`;
    wrap.append(label, input);
    place.append(wrap);
    if (attributes.type === "number") {
      input.addEventListener("keydown", (event) => {
        const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
        if (!way || input.readOnly) return;
        event.preventDefault();
        input.value = String(rounded(input.valueAsNumber + way * attributes.step * (event.shiftKey ? 10 : 1)));
        input.dispatchEvent(new Event("input"));
        input.dispatchEvent(new Event("change"));
      });
    }
    return input;
  }

  find("keys").addEventListener("click", (event) => {
    const j = [...find("keys").children].indexOf(event.target.closest('[role="option"]'));
    if (j >= 0) choose(j);
  });
  find("keys").addEventListener("keydown", (event) => {
    const n = state.get().keys.length;
    const to = { ArrowDown: selected + 2, ArrowUp: selected - 2, ArrowRight: selected + 1, ArrowLeft: selected - 1, Home: 0, End: n - 1 }[event.key];
    if (event.key === "Delete" || event.key === "Backspace") removeKey(selected);
    else if (to !== undefined) choose(Math.max(0, Math.min(n - 1, to)));
    else return;
    event.preventDefault();
    request(() => find("keys").children[selected]?.focus());
  });
  find("add").addEventListener("click", () => addKey(null));
  find("remove").addEventListener("click", () => removeKey(selected));
  find("restart").addEventListener("click", () => { if (loaded) state.update({ keys: freshKeys(loaded.dimension, loaded.box) }, { push: true }); });

  // ---- controls ------------------------------------------------------------------------------------------------------

  const rateAt = (share) => rounded((RATES[0] * (RATES[1] / RATES[0]) ** share) / (span() / 2) ** 2);
  const shareOf = (R) => Math.log((R * (span() / 2) ** 2) / RATES[0]) / Math.log(RATES[1] / RATES[0]);
  let lastRate = 60;

  for (const name of ["cells", "values", "tint"]) {
    for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
      input.addEventListener("change", () => { if (input.checked) state.update({ [name]: input.value }, { push: true }); });
    }
  }
  find("follow").addEventListener("change", (event) => {
    const now = state.get();
    const patch = { follow: event.target.checked };
    if (!patch.follow && loaded?.f) patch.keys = now.keys.map((key) => { const { v, g } = valuesOf(key, now); return { ...key, v: rounded(v), g: g.map(rounded) }; });
    state.update(patch, { push: true });
  });
  find("rate").addEventListener("input", (event) => state.update({ R: rateAt(Number(event.target.value) / 1000) }, { live: true }));
  find("rate").addEventListener("change", () => { state.update({}, { push: true }); announce(`R ${shown(state.get().R, 3)}. Largest error seen ${shown(current?.seen ?? NaN, 3)}.`); });
  find("hard").addEventListener("change", (event) => state.update({ R: event.target.checked ? "hard" : lastRate }, { push: true }));
  find("output").addEventListener("change", (event) => state.update({ output: Math.max(0, event.target.valueAsNumber || 0) }, { push: true }));
  find("controls").addEventListener("submit", (event) => event.preventDefault());

  EXAMPLES.forEach(([name], k) => find("example").append(new Option(name, String(k))));
  find("example").append(new Option("your own", "own"));
  find("example").addEventListener("change", (event) => {
    const example = EXAMPLES[Number(event.target.value)];
    if (!example) { find("function").focus(); return; }
    const [, f, d] = example;
    const now = state.get(), dimension = dimensionOf(d);
    const keys = now.keys[0].x.length === dimension ? {} : { keys: freshKeys(dimension) };
    state.update({ f, d, output: 0, overlay: null, ...keys }, { push: true });
  });

  let typing = null;
  for (const [id, name] of [["function", "f"], ["domain", "d"]]) {
    find(id).addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => read(find("function").value, find("domain").value, true), 260);
    });
    find(id).addEventListener("change", () => { clearTimeout(typing); read(find("function").value, find("domain").value, true); });
    find(id).dataset.entry = name;
  }

  function showControls(now) {
    for (const name of ["cells", "values", "tint"]) for (const input of document.querySelectorAll(`input[name="${name}"]`)) input.checked = input.value === now[name];
    find("follow").checked = now.follow;
    find("hard").checked = now.R === "hard";
    find("rate").disabled = now.R === "hard";
    if (now.R !== "hard") {
      lastRate = now.R;
      const place = String(Math.round(1000 * Math.min(1, Math.max(0, shareOf(now.R)))));
      if (find("rate").value !== place && document.activeElement !== find("rate")) find("rate").value = place;
    }
    text("rate-text", now.R === "hard" ? "R → ∞" : `R = ${shown(now.R, 3)}`);
    find("rate").setAttribute("aria-valuetext", now.R === "hard" ? "hard" : `R ${shown(now.R, 3)}`);
    const chosen = EXAMPLES.findIndex(([, f, d]) => f === now.f && d === now.d);
    find("example").value = chosen >= 0 ? String(chosen) : "own";
    find("output-row").hidden = !(loaded?.outputs > 1);
    find("output").value = String(now.output);
    if (loaded?.outputs > 1) find("output").max = String(loaded.outputs - 1);
    find("tint-row").hidden = dimensionOf(now.d) === 1;
  }

  // ---- the function --------------------------------------------------------------------------------------------------

  /** Reads text and domain; the last good function stays while they are wrong. `typed`: then the state follows. */
  async function read(f, d, typed) {
    const key = JSON.stringify([f, d]);
    if (key === readingText) return;
    if (typed && loaded && loaded.text === f && loaded.domain === d) { complain(null); return; }
    reading?.abort();
    reading = new AbortController();
    readingText = key;
    const { signal } = reading;
    let found;
    try {
      found = await studio.functions(f, d, { signal });
      if (signal.aborted) return;
      if (found.dimension > 2) throw Object.assign(new Error(`The playground draws one or two variables; this box has ${found.dimension}. Compile works with more.`), { where: "domain", start: null, end: null });
    } catch (error) {
      if (signal.aborted || error.type === "Cancelled") return;
      readingText = null;
      complain(error, f, d);
      becomeReady();
      return;
    }
    readingText = null;
    complain(null);
    await take(found, f, d, typed);
  }

  async function take(found, f, d, typed) {
    const output = Math.min(state.get().output, (found.outputs ?? 1) - 1), mine = reading;
    const printed = compileNodes(found.graph, output);
    const sampled = printed || !server ? null : await sample(found, f, d, output).catch((error) => { complain(error, f, d); return null; });
    if (reading !== mine) return; // something newer was typed meanwhile
    const before = loaded, now = state.get();
    const closure = printed ?? sampled?.f ?? null;
    const fresh = { text: f, domain: d, graph: found.graph, box: found.box, dimension: found.dimension, outputs: found.outputs ?? 1, output, label: found.label, f: closure, sampled };
    fresh.search = closure ? new ErrorSearch(closure, found.box, found.dimension) : null;
    loaded = fresh;
    query = null;
    const patch = {};
    if (now.f !== f) patch.f = f;
    if (now.d !== d) patch.d = d;
    if (now.keys[0].x.length !== found.dimension) patch.keys = freshKeys(found.dimension, found.box);
    else if (typed && before && before.domain !== d && before.dimension === found.dimension) patch.keys = moved(now.keys, before.box, found.box);
    if (Object.keys(patch).length) state.update(patch, typed ? { push: true } : {});
    else { showControls(now); request(work); rest(); }
    caption();
    if (element.hidden) becomeReady(); // another tab is open: nothing is drawn here
    if (typed) announce(`f = ${found.label ?? f} on ${d}.`);
  }

  /** A function with an operation that the printer does not know: the server samples it, and f is interpolated between its samples. */
  async function sample(found, f, d, output) {
    const { box: { lo, hi }, dimension } = found, n = dimension === 1 ? 2048 : 256;
    const { values } = await server.call("/api/sample", { text: f, domain: d, grid: dimension === 1 ? [n] : [n, n], output });
    const table = Float64Array.from(values, (v) => v ?? NaN);
    const place = (x, i) => Math.min(n - 1, Math.max(0, ((x - lo[i]) / (hi[i] - lo[i])) * n - 0.5));
    const along = (at, start, stride) => { const k = Math.min(n - 2, Math.floor(at)), a = table[start + k * stride]; return a + (at - k) * (table[start + (k + 1) * stride] - a); };
    const between = ([x, y]) => {
      if (dimension === 1) return along(place(x, 0), 0, 1);
      const at = place(x, 0), k = Math.min(n - 2, Math.floor(at)), a = along(place(y, 1), k * n, 1);
      return a + (at - k) * (along(place(y, 1), (k + 1) * n, 1) - a);
    };
    return { n, function: table, f: between };
  }

  /** Keys keep their place in the box when the box changes. */
  function moved(keys, from, to) {
    return keys.map((key) => ({
      ...key, x: key.x.map((c, i) => rounded(to.lo[i] + ((c - from.lo[i]) / (from.hi[i] - from.lo[i])) * (to.hi[i] - to.lo[i]))),
    }));
  }

  function complain(error, f = "", d = "") {
    for (const where of ["function", "domain"]) {
      const box = find(`${where}-error`), mine = error && (error.where === where || (where === "function" && error.where !== "domain"));
      box.hidden = !mine;
      find(where).setAttribute("aria-invalid", String(Boolean(mine)));
      if (!mine) continue;
      const written = where === "function" ? f : d;
      const marked = Number.isInteger(error.start) && error.start !== null;
      box.querySelector(".caret").textContent = marked ? `${written}\n${" ".repeat(error.start)}${"^".repeat(Math.max(1, (error.end ?? error.start + 1) - error.start))}` : "";
      box.querySelector("span").textContent = (marked && error.short) || error.message;
      announce(error.short || error.message);
    }
  }

  function caption() {
    const { lo, hi } = loaded.box, range = (i) => `${shown(lo[i], 3)} to ${shown(hi[i], 3)}`;
    const how = loaded.dimension === 1
      ? "Drag a key along the axis. Double-click adds one."
      : `x from ${range(0)} across, y from ${range(1)} upward. Drag a center; double-click adds a key.`;
    text("caption", loaded.sampled ? `${how} The server samples this function; between the samples it is interpolated.` : how);
  }

  // ---- the proved bound ----------------------------------------------------------------------------------------------

  /** What a bound is about: text, domain and every number of the head. */
  function signature() {
    if (!current || !loaded) return null;
    const { text, domain, output } = current.loaded;
    current.signature ??= JSON.stringify([text, domain, output, current.head.hard, wireOf(current.head)]);
    return current.signature;
  }

  /** The state has changed and is not in the middle of a drag: refine and prove once it rests. */
  function rest() {
    clearTimeout(settle);
    settle = setTimeout(settled, REST);
  }

  function settled() {
    if (element.hidden || !loaded) return;
    if (!upToDate()) { request(work); rest(); return; }
    if (loaded.search && !current.refined) {
      const better = loaded.search.refine(current.head, current.cells);
      if (better.seen >= current.seen) Object.assign(current, better);
      current.refined = true;
      request(work);
    }
    prove();
  }

  async function prove() {
    const mine = signature();
    if (!mine || proof.signature === mine || asked?.signature === mine) return;
    asked?.controller.abort();
    asked = null;
    // The text is written with the answer, not one frame later: figures() and the page never disagree.
    const say = (note, result = null) => { proof = { signature: mine, note, result }; showFigures(); request(work); };
    if (!server) { say("A proved bound needs the server: run partita studio."); return; }
    if (current.head.hard) { say("The hard head is the limit R → ∞. Choose a finite temperature for a proved bound."); return; }
    const controller = new AbortController();
    asked = { signature: mine, controller };
    find("proved").setAttribute("aria-busy", "true");
    request(work);
    try {
      const result = await server.job("bound", { text: loaded.text, domain: loaded.domain, head: wireOf(current.head), output: loaded.output }, { signal: controller.signal });
      if (controller.signal.aborted) return;
      if (result.seen > current.seen && signature() === mine) Object.assign(current, { seen: result.seen, at: result.seen_at ?? current.at });
      say(result.kind === "estimated" ? "From samples." : result.complete === false ? "Proved; more time would tighten it." : "Proved for every point of the box.", result);
      showTerms(result.terms ?? [], result.assumptions ?? []);
      announce(`${result.kind === "estimated" ? "Estimate" : "Proved bound"} ${shown(result.bound, 4)}.`);
    } catch (error) {
      if (controller.signal.aborted) return;
      say(error.short || error.message);
    } finally {
      if (asked?.controller === controller) { asked = null; find("proved").removeAttribute("aria-busy"); }
    }
  }

  function showTerms(terms, assumptions) {
    const table = document.createElement("table");
    for (const term of terms) {
      const row = table.insertRow(), name = document.createElement("th");
      name.scope = "row";
      name.textContent = term.name;
      if (term.formula) name.title = `${term.formula}${term.theorem ? ` (${term.theorem})` : ""}`;
      row.append(name);
      row.insertCell().textContent = shown(term.value, 4);
      if (term.formula) {
        const more = document.createElement("div");
        more.className = "note";
        more.textContent = term.formula;
        name.append(more);
      }
    }
    const given = document.createElement("p");
    given.className = "note";
    given.textContent = assumptions.length ? `Assumed: ${assumptions.map((a) => a.statement ?? a).join("; ")}.` : "";
    find("terms-table").replaceChildren(table, given);
  }

  // ---- Python --------------------------------------------------------------------------------------------------------

  find("python").addEventListener("click", async () => {
    const box = find("python-box"), open = box.hidden;
    find("python").setAttribute("aria-expanded", String(open));
    box.hidden = !open;
    if (open) writePython();
  });
  async function writePython() {
    if (find("python-box").hidden || !current) return;
    try {
      const { pythonForHead } = await import("./python_text.js");
      find("python-box").querySelector("pre").textContent = pythonForHead(state.get(), wireOf(current.head), loaded.box);
    } catch (error) { find("python-box").querySelector("pre").textContent = `# ${error.message}`; }
  }
  find("copy").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(find("python-box").querySelector("pre").textContent); announce("Copied."); } catch { announce("The browser does not allow copying; select the text instead."); }
  });

  // ---- follow the state ----------------------------------------------------------------------------------------------

  async function fetchOverlay(now) {
    if (!now.overlay || overlayCurves) return;
    try { ({ overlayCurves } = await import("./overlays.js")); request(work); } catch { overlayCurves = () => []; }
  }

  state.subscribe((now, before, source) => {
    showControls(now);
    if (now.f !== before.f || now.d !== before.d || source === "address") {
      if (document.activeElement !== find("function")) find("function").value = now.f;
      if (document.activeElement !== find("domain")) find("domain").value = now.d;
    }
    if (!loaded || loaded.text !== now.f || loaded.domain !== now.d) read(now.f, now.d, false);
    else if (now.output !== before.output) take(loaded, now.f, now.d, false);
    fetchOverlay(now);
    request(work);
    rest();
    if (!find("python-box").hidden) setTimeout(writePython, 60);
  });
  studio.onTab?.(() => { request(work); rest(); });
  addEventListener("studio-theme", () => request(work));
  addEventListener("resize", () => request(work));

  const now = state.get();
  find("function").value = now.f;
  find("domain").value = now.d;
  showControls(now);
  fetchOverlay(now);
  read(now.f, now.d, false);

  return {
    element, ready, picture, graphs,
    painter: () => picture.painter.kind,
    head: () => (current ? wireOf(current.head) : null),
    evaluate: (point) => (current ? evaluate(current.head, point[0], point[1] ?? 0) : NaN),
    valueOf: (j, point) => valueOf(current.head, j, point[0], point[1] ?? 0),
    figures: () => ({
      seen: current?.seen ?? null, seenAt: current?.at ?? null, refined: upToDate() && current.refined, keys: state.get().keys.length,
      dead: current?.cells ? [...current.cells.dead].flatMap((d, j) => (d ? [j] : [])) : [],
      bound: proof.signature === signature() && upToDate() ? proof.result?.bound ?? null : null, kind: proof.signature === signature() ? proof.result?.kind ?? null : null, curves: { ...graphs.differences },
    }),
  };
}
