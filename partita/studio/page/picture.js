/**
 * A picture of a head on a box in the plane: up to four square panes in one canvas, with titles and colour bars.
 *
 *     const picture = new Picture(element, options)
 *     picture.show({head, hard, graph, output, box, panes, sampled, tint, selected, mark, dead, valueRange, errorRange})
 *     picture.remove()
 *
 * `head` is a head on the wire or of head.js, or null with `sampled`; `sampled` = {n, head, function, f} has n x n numbers in the
 * order of /api/sample with grid: [n, n] (first axis slowest, null or NaN where undefined), for heads and functions that the page cannot evaluate. Everything else
 * may be left out: the ranges are found from samples. Entries not named keep their last value.
 *
 * options: {panes, maxSize: () => CSS pixels per pane, label, onSelect(j), onMove(j, point, phase), onAdd(point),
 * onRemove(j), onStep(j, difference), onHover(point | null), onWheel(j, steps), selected(), work}; phase is "move" or "end". With onMove the picture takes the
 * keyboard too: arrows move the selected key (Shift: ten times as far), Page Up and Page Down choose one, Delete removes it.
 *
 * `work`, where given, is the owner's frame: it calls show(…, {atOnce: true}), so that one frame has one draw call.
 *
 * Where float32 is too coarse for the numbers (measured at sample points against float64), or the head has more than 512
 * keys, float64 script fills a field of samples in slices and the panes show that.
 */

import { DARK, LIGHT, gradient } from "./colours.js";
import { frame, request, slices } from "./frame.js";
import { compileNodes } from "./graph.js";
import { ErrorSearch, evaluate, exponents, headOf } from "./head.js";
import { CanvasPainter } from "./painter_canvas.js";
import { GlPainter } from "./painter_gl.js";

const TITLES = { cells: "Cells", head: "Head", function: "Function", error: "Error: head − function" };
const GAP = 14, TITLE = 24, BAR = 30, REACH = 24, MANY_KEYS = 512, FIELD = 160;

/** Numbers for people: four digits, a real minus sign. */
export function shown(x, digits = 4) {
  if (!Number.isFinite(x)) return "undefined";
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-3 ? x.toExponential(Math.min(digits, 3) - 1).replace("e+", "e") : String(Number(x.toPrecision(digits)));
  return text.replaceAll("-", "−");
}

export function themeNow() {
  const chosen = document.documentElement.dataset.theme;
  const dark = chosen === "dark" || (chosen !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  return dark ? DARK : LIGHT;
}

/** A round number that is at least x, so that colour bars do not flicker. */
function roundUp(x) {
  if (!(x > 0) || !Number.isFinite(x)) return 1e-12;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((k) => Number((k * power).toPrecision(3))).find((y) => y >= x) ?? x;
}

/** Whether the page should paint with a 2-D canvas: asked for in the address, or no WebGL2. */
const askedForCanvas = () => new URLSearchParams(location.search).get("painter") === "canvas";

export class Picture {
  constructor(element, options = {}) {
    this.element = element;
    this.options = options;
    this.now = { panes: options.panes ?? ["cells", "head", "function", "error"], tint: "value", selected: -1, output: 0, dead: null };
    this.quality = 1;
    element.classList.add("picture");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    element.append(this.canvas);
    this.painter = (askedForCanvas() ? null : GlPainter.create(this.canvas)) ?? new CanvasPainter(this.freshCanvas());
    this.labels = [];
    this.work = () => this.paint();
    this.observer = new ResizeObserver(() => this.invalidate());
    this.observer.observe(element);
    this.onTheme = () => this.invalidate();
    addEventListener("studio-theme", this.onTheme);
    if (options.onHover || options.onMove) this.listen();
  }

  /** A canvas that failed to give WebGL2 cannot be relied on for 2-D drawing: take a new one. */
  freshCanvas() {
    const canvas = this.canvas.cloneNode();
    this.canvas.replaceWith(canvas);
    this.canvas = canvas;
    return canvas;
  }

  remove() {
    this.stopField?.();
    this.observer.disconnect();
    removeEventListener("studio-theme", this.onTheme);
    this.element.replaceChildren();
  }

  invalidate() {
    request(this.options.work ?? this.work);
  }

  /** `atOnce` paints in the frame that is running, otherwise the next one does. */
  show(what, { atOnce = false } = {}) {
    const before = this.now, now = (this.now = { ...before, ...what });
    if (now.head && !(now.head.centers instanceof Float64Array)) now.head = headOf(now.head, { hard: now.hard ?? false });
    if (now.graph !== before.graph || now.output !== before.output || now.box !== before.box) {
      this.inShader = this.painter.setFunction(now.graph ?? null, now.output);
      this.f = now.graph ? compileNodes(now.graph, now.output) : null;
      this.search = this.f && now.box ? new ErrorSearch(this.f, now.box, 2) : null;
    }
    if (now.head !== before.head || now.dead !== before.dead) this.painter.setHead(now.head ?? null, now.dead);
    this.chooseFields(before);
    if (atOnce) this.paint();
    else this.invalidate();
  }

  /** Decides which numbers come from float64 script or from the server, and starts to compute them. */
  chooseFields(before) {
    const { now } = this;
    if (!now.box) return;
    this.findRanges();
    const changed = ["head", "graph", "box", "sampled", "output"].some((name) => now[name] !== before[name]);
    if (!changed) return;
    this.stopField?.();
    const need = { function: !this.inShader && now.panes.some((kind) => kind === "function" || kind === "error"), head: false, error: false, winner: false };
    if (now.head) {
      const coarse = this.singleError();
      const many = now.head.n > MANY_KEYS;
      need.winner = many;
      need.head = many || coarse > 0.002 * (this.valueRange[1] - this.valueRange[0]);
      need.error = many || coarse > 0.01 * this.errorRange;
    } else if (now.sampled?.head) need.head = need.error = true;
    this.needs = need;
    if (Object.values(need).some(Boolean)) this.fillField(need);
    else this.painter.setField(null);
  }

  /** The largest difference between float32 and float64 values of head - f at sample points. */
  singleError() {
    const { head, box } = this.now;
    let worst = 0;
    for (let k = 1; k <= 24; k += 1) {
      const x = box.lo[0] + ((k * 0.7548776662) % 1) * (box.hi[0] - box.lo[0]);
      const y = box.lo[1] + ((k * 0.5698402910) % 1) * (box.hi[1] - box.lo[1]);
      const f = this.f ? this.f([x, y]) : 0;
      const error = Math.abs(evaluateSingle(head, box, x, y) - evaluate(head, x, y)) + (Number.isFinite(f) ? 2 ** -23 * Math.abs(f) : 0);
      if (error > worst) worst = error;
    }
    return worst;
  }

  fillField(need) {
    const { now } = this, { box, head, sampled } = now;
    const send = (n, made) => { this.painter.setField({ n, ...made }); this.invalidate(); };
    const blank = (n) => Object.fromEntries(Object.entries(need).map(([name, wanted]) => [name, wanted ? new Float32Array(n * n) : null]));
    const given = (name, n, k) => {
      if (!sampled?.[name] || sampled.n !== n) return undefined;
      return sampled[name][(k % n) * n + Math.floor(k / n)] ?? NaN;
    };
    const scratch = new Float64Array(head?.n ?? 0);
    const point = [0, 0];
    const one = (made, n, k) => {
      point[0] = box.lo[0] + (((k % n) + 0.5) / n) * (box.hi[0] - box.lo[0]);
      point[1] = box.lo[1] + ((Math.floor(k / n) + 0.5) / n) * (box.hi[1] - box.lo[1]);
      const net = need.head || need.error ? given("head", n, k) ?? (head ? evaluate(head, point[0], point[1]) : NaN) : 0;
      const f = need.function || need.error ? given("function", n, k) ?? (this.f ?? sampled?.f)?.(point) ?? NaN : 0;
      if (made.function) made.function[k] = f;
      if (made.head) made.head[k] = net;
      if (made.error) made.error[k] = net - f;
      if (made.winner) made.winner[k] = exponents(head, point[0], point[1], scratch);
    };
    if (!head && !sampled && !this.f) { this.painter.setField(null); return; }
    const sizes = sampled ? [sampled.n] : head && head.n > MANY_KEYS ? [20, 64, FIELD] : [32, FIELD];
    let level = 0, k = 0, made = blank(sizes[0]);
    const step = () => {
      const n = sizes[level], end = Math.min(k + 16, n * n);
      for (; k < end; k += 1) one(made, n, k);
      if (k < n * n) return false;
      send(n, made);
      level += 1;
      if (level < sizes.length) { k = 0; made = blank(sizes[level]); }
      return level >= sizes.length;
    };
    if (!sampled && (head?.n ?? 0) <= 64) while (level === 0) step();
    this.stopField = level < sizes.length ? slices(step) : null;
  }

  findRanges() {
    const { now } = this;
    let [lo, hi] = now.valueRange ?? this.search?.range ?? rangeOf(now.sampled?.function ?? now.sampled?.head ?? now.head?.values ?? [0, 1]);
    if (!(hi - lo > 1e-12 * Math.max(Math.abs(lo), Math.abs(hi), 1e-300))) { lo -= 0.5; hi += 0.5; }
    this.valueRange = [lo, hi];
    if (now.errorRange !== undefined) this.errorRange = roundUp(now.errorRange);
    else if (this.search && now.head) this.errorRange = roundUp(now.head.n <= MANY_KEYS ? this.search.coarse(now.head).seen : quickError(this.search, now.head));
    else if (now.sampled?.head && now.sampled.function) this.errorRange = roundUp(now.sampled.head.reduce((m, v, k) => Math.max(m, Math.abs(v - now.sampled.function[k]) || 0), 0));
    else this.errorRange = 1;
  }

  layout() {
    const width = this.element.clientWidth, { panes } = this.now;
    const columns = panes.length === 1 ? 1 : 2, rows = Math.ceil(panes.length / columns);
    const most = this.options.maxSize?.(rows) ?? 360;
    const size = Math.max(80, Math.min(Math.floor((width - (columns - 1) * GAP) / columns), most));
    const left = Math.max(0, Math.floor((width - columns * size - (columns - 1) * GAP) / 2));
    this.panes = panes.map((kind, i) => ({
      kind, size, x: left + (i % columns) * (size + GAP), y: Math.floor(i / columns) * (size + TITLE + BAR + 6) + TITLE,
    }));
    this.height = rows * (size + TITLE + BAR + 6);
    this.width = width;
    const key = JSON.stringify([this.panes, width]);
    if (key !== this.layoutKey) {
      this.layoutKey = key;
      this.element.style.height = `${this.height}px`;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${this.height}px`;
      this.placeLabels();
    }
  }

  placeLabels() {
    for (const label of this.labels) label.remove();
    this.labels = this.panes.map((pane) => {
      const label = document.createElement("div");
      label.className = "pane-label";
      label.dataset.testid = `pane-${pane.kind}`;
      Object.assign(label.style, { left: `${pane.x}px`, top: `${pane.y - TITLE}px`, width: `${pane.size}px` });
      label.innerHTML = '<div class="pane-title"></div><div class="pane-bar"><span class="bar-low"></span><span class="bar"></span><span class="bar-high"></span></div>';
      label.querySelector(".pane-bar").style.marginTop = `${pane.size + 6}px`;
      label.querySelector(".pane-title").textContent = TITLES[pane.kind];
      this.element.append(label);
      return label;
    });
  }

  /** A cross at the marked query, in every pane. */
  placeMarks() {
    const { mark, box } = this.now;
    const show = mark?.length === 2 ? this.panes : [];
    this.crosses ??= [];
    while (this.crosses.length > show.length) this.crosses.pop().remove();
    while (this.crosses.length < show.length) {
      const cross = document.createElement("div");
      cross.className = "query-mark";
      this.element.append(cross);
      this.crosses.push(cross);
    }
    show.forEach((pane, i) => {
      const x = pane.x + ((mark[0] - box.lo[0]) / (box.hi[0] - box.lo[0])) * pane.size, y = pane.y + ((box.hi[1] - mark[1]) / (box.hi[1] - box.lo[1])) * pane.size;
      Object.assign(this.crosses[i].style, { left: `${x}px`, top: `${y}px` });
    });
  }

  fillLabels() {
    this.panes.forEach((pane, i) => {
      const signed = pane.kind === "error", plain = pane.kind === "cells" && this.now.tint === "key";
      const [lo, hi] = signed ? [-this.errorRange, this.errorRange] : this.valueRange;
      const key = `${plain} ${lo} ${hi}`;
      const label = this.labels[i];
      if (label.dataset.key === key) return;
      label.dataset.key = key;
      label.querySelector(".bar").style.background = plain ? "none" : gradient(signed ? "signed" : "value");
      label.querySelector(".bar-low").textContent = plain ? "one tint per key" : shown(lo, 3);
      label.querySelector(".bar-high").textContent = plain ? "" : shown(hi, 3);
    });
  }

  /** One frame. Slow frames in a row lower the resolution until the picture rests. */
  paint() {
    if (!this.now.box || this.element.clientWidth === 0) return;
    this.layout();
    this.fillLabels();
    this.placeMarks();
    if (this.rests) this.quality = Math.min(1, this.quality * 1.3);
    else if (frame.waitMs > 50) this.quality = Math.max(0.3, this.quality * Math.max(0.5, Math.sqrt(40 / frame.waitMs)));
    this.drawAt(this.sharp() * (this.rests ? 1 : this.quality));
    clearTimeout(this.resting);
    if (this.quality < 1 && !this.rests) this.resting = setTimeout(() => { this.rests = true; this.invalidate(); }, 250);
    this.rests = false;
  }

  /** Device pixels per CSS pixel of a picture at rest; fewer where the processor paints and there is much to paint. */
  sharp() {
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const work = this.width * this.height * ratio ** 2 * Math.min(this.now.head?.n ?? 1, MANY_KEYS);
    return this.painter.software ? ratio * Math.min(1, Math.sqrt(4e7 / work)) : ratio;
  }

  drawAt(ratio) {
    const { now, painter } = this;
    painter.resize(this.width, this.height, ratio);
    painter.paint({
      panes: this.panes, ratio, box: now.box, valueRange: this.valueRange, errorRange: this.errorRange, tint: now.tint,
      selected: now.selected, theme: themeNow(), dots: now.dots,
    });
    frame.draws += painter.draws;
  }

  /** The pane under a place of the page and the point of the box there, or null. */
  locate(event) {
    const frameOf = this.canvas.getBoundingClientRect(), x = event.clientX - frameOf.left, y = event.clientY - frameOf.top;
    const pane = this.panes?.find((p) => x >= p.x && x <= p.x + p.size && y >= p.y && y <= p.y + p.size);
    return pane ? { pane, point: this.pointIn(pane, x, y), x, y } : null;
  }

  pointIn(pane, x, y) {
    const { lo, hi } = this.now.box;
    const s = Math.min(1, Math.max(0, (x - pane.x) / pane.size)), t = Math.min(1, Math.max(0, 1 - (y - pane.y) / pane.size));
    return [lo[0] + s * (hi[0] - lo[0]), lo[1] + t * (hi[1] - lo[1])];
  }

  /** The key whose center is within reach of a place, or -1. */
  keyNear({ pane, x, y }, reach = REACH) {
    const { head, box } = this.now;
    if (!head || head.n > MANY_KEYS) return -1;
    let best = -1, nearest = reach;
    for (let j = 0; j < head.n; j += 1) {
      const px = pane.x + ((head.centers[2 * j] - box.lo[0]) / (box.hi[0] - box.lo[0])) * pane.size;
      const py = pane.y + ((box.hi[1] - head.centers[2 * j + 1]) / (box.hi[1] - box.lo[1])) * pane.size;
      const away = Math.hypot(px - x, py - y);
      if (away < nearest) { nearest = away; best = j; }
    }
    return best;
  }

  /** Where a key stands in the page, in the first pane (for tests and for focus rings). */
  placeOf(j, kind = this.panes[0].kind) {
    const pane = this.panes.find((p) => p.kind === kind), { head, box } = this.now, frameOf = this.canvas.getBoundingClientRect();
    return {
      x: frameOf.left + pane.x + ((head.centers[2 * j] - box.lo[0]) / (box.hi[0] - box.lo[0])) * pane.size,
      y: frameOf.top + pane.y + ((box.hi[1] - head.centers[2 * j + 1]) / (box.hi[1] - box.lo[1])) * pane.size,
    };
  }

  listen() {
    const { canvas, options } = this;
    let drag = null, lastTap = null;
    canvas.addEventListener("touchstart", (event) => {
      const spot = event.touches.length === 1 ? this.locate(event.touches[0]) : null;
      if (options.onMove && spot && this.keyNear(spot) >= 0) event.preventDefault(); // a key is dragged, the page is not
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      const spot = this.locate(event);
      if (!spot || event.button > 0 || drag) return;
      const j = this.keyNear(spot);
      drag = { id: event.pointerId, j, pane: spot.pane, x: event.clientX, y: event.clientY, moved: false };
      if (j >= 0 && options.onMove) {
        canvas.setPointerCapture(event.pointerId);
        options.onSelect?.(j);
      }
      options.onHover?.(spot.point);
    });
    canvas.addEventListener("pointermove", (event) => {
      const spot = this.locate(event);
      if (drag && drag.id === event.pointerId && drag.j >= 0 && options.onMove) {
        if (!drag.moved && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < 3) return;
        drag.moved = true;
        const box = canvas.getBoundingClientRect();
        drag.point = this.pointIn(drag.pane, event.clientX - box.left, event.clientY - box.top);
        options.onMove(drag.j, drag.point, "move");
        options.onHover?.(drag.point);
        return;
      }
      canvas.classList.toggle("grab", Boolean(options.onMove && spot && this.keyNear(spot) >= 0));
      options.onHover?.(spot ? spot.point : null);
    });
    const end = (event) => {
      if (!drag || drag.id !== event.pointerId) return;
      const { j, moved, point } = drag;
      drag = null;
      if (moved) { options.onMove?.(j, point, "end"); return; }
      if (event.type !== "pointerup") return;
      const tap = { time: event.timeStamp, x: event.clientX, y: event.clientY };
      const spot = this.locate(event);
      if (lastTap && tap.time - lastTap.time < 400 && Math.hypot(tap.x - lastTap.x, tap.y - lastTap.y) < 20 && j < 0 && spot) {
        options.onAdd?.(spot.point);
        lastTap = null;
      } else lastTap = tap;
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("pointerleave", () => { if (!drag) options.onHover?.(null); });
    canvas.addEventListener("wheel", (event) => {
      const spot = this.locate(event), j = spot ? this.keyNear(spot) : -1;
      if (j < 0 || !options.onWheel) return;
      event.preventDefault();
      options.onWheel(j, -Math.sign(event.deltaY));
    }, { passive: false });
    if (options.onMove) this.listenToKeys();
  }

  listenToKeys() {
    const { element, options } = this;
    element.tabIndex = 0;
    element.setAttribute("role", "application");
    element.setAttribute("aria-roledescription", "picture with movable keys");
    element.setAttribute("aria-label", options.label ?? "Picture of the head. Arrow keys move the selected key, Shift moves it further, Page Up and Page Down choose a key, Insert adds one, Delete removes it.");
    element.addEventListener("keydown", (event) => {
      const { head, box } = this.now;
      if (!head || event.altKey || event.ctrlKey || event.metaKey) return;
      const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      const j = Math.max(0, options.selected?.() ?? this.now.selected), far = event.shiftKey ? 0.1 : 0.01;
      if (way) options.onStep?.(j, way.map((w, i) => w * far * (box.hi[i] - box.lo[i])));
      else if (event.key === "PageDown" || event.key === "PageUp") options.onSelect?.((j + (event.key === "PageDown" ? 1 : head.n - 1)) % head.n);
      else if (event.key === "Delete" || event.key === "Backspace") options.onRemove?.(j);
      else if (event.key === "Insert") options.onAdd?.(null);
      else return;
      event.preventDefault();
    });
  }
}

/** net as the shader computes it: every operation rounded to float32. */
function evaluateSingle(head, box, x, y) {
  const r = Math.fround, mx = (box.lo[0] + box.hi[0]) / 2, my = (box.lo[1] + box.hi[1]) / 2;
  const zx = r(x - mx), zy = r(y - my), rx = r(head.rates[0]), ry = r(head.rates[1]);
  let base = -Infinity;
  for (let j = 0; j < head.n; j += 1) base = Math.max(base, head.biases[j]);
  let first = -Infinity, winner = 0;
  const e = head.scratch;
  const step = Math.max(1, Math.floor(head.n / 4096));
  for (let j = 0; j < head.n; j += step) {
    const dx = r(zx - r(head.centers[2 * j] - mx)), dy = r(zy - r(head.centers[2 * j + 1] - my));
    e[j] = r(r(head.biases[j] - base) - r(0.5 * r(r(r(rx * dx) * dx) + r(r(ry * dy) * dy))));
    if (e[j] > first) { first = e[j]; winner = j; }
  }
  let least = Infinity, most = -Infinity;
  for (let j = 0; j < head.n; j += 1) { least = Math.min(least, head.values[j]); most = Math.max(most, head.values[j]); }
  const offset = r((least + most) / 2);
  const value = (j) => {
    const v = r(head.values[j] - offset);
    if (!head.slopes) return v;
    return r(v + r(r(r(head.slopes[2 * j]) * r(zx - r(head.centers[2 * j] - mx))) + r(r(head.slopes[2 * j + 1]) * r(zy - r(head.centers[2 * j + 1] - my)))));
  };
  const top = value(winner);
  if (head.hard) return r(top + offset);
  let sum = 0, behind = 0;
  for (let j = 0; j < head.n; j += step) {
    const w = r(Math.exp(r(e[j] - first)));
    sum = r(sum + w);
    behind = r(behind + r(w * r(value(j) - top)));
  }
  return r(r(top + r(behind / sum)) + offset);
}

function quickError(search, head) {
  let worst = 0;
  for (let k = 0; k < search.count; k += 13) {
    const error = Math.abs(evaluate(head, search.points[2 * k], search.points[2 * k + 1]) - search.values[k]);
    if (error > worst && error < Infinity) worst = error;
  }
  return worst;
}

function rangeOf(numbers) {
  let lo = Infinity, hi = -Infinity;
  for (const v of numbers) if (Number.isFinite(v)) { lo = Math.min(lo, v); hi = Math.max(hi, v); }
  return lo <= hi ? [lo, hi] : [0, 1];
}
