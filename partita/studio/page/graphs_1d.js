/**
 * A head of one variable as four graphs (SVG): scores and their upper envelope, weights, head beside function, error.
 *
 *     const graph = new Graph1d(element, {onSelect, onMove, onAdd, onRemove, onHover, onValue, maxHeight, label})
 *     graph.show({head, f, box, selected, dead, hover, curves, canSetValues})
 *
 * The scores are s_j(x) = E_j(x)/R + (x - middle)^2/2: straight lines with the same winner as the exponents at every x.
 * `curves` = [{label, f}] are drawn beside f. `differences` has the largest |curve - f| of each on the grid.
 * Keys are dragged along the axis in every graph; in "Head and function" a dot moves up and down too when values are the
 * caller's own (onValue(j, value, phase)). The keyboard works as in picture.js.
 */

import { evaluate, valueOf, weights } from "./head.js";
import { frame, request } from "./frame.js";
import { shown, themeNow } from "./picture.js";

const SVG = "http://www.w3.org/2000/svg";
const CHARTS = [["scores", "Scores and their upper envelope"], ["weights", "Weights"], ["values", "Head and function"], ["error", "Error: head − function"]];
const POINTS = 257, REACH = 24, PAD = { left: 46, right: 10, top: 26, bottom: 22 };
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 3"];

function make(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent?.append(node);
  return node;
}

/** About four round numbers in [lo, hi]. */
export function ticks(lo, hi, about = 4) {
  const raw = (hi - lo) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw / 1.4) ?? power;
  const found = [];
  for (let k = Math.ceil(lo / step); k * step <= hi + 1e-9 * step && found.length < 12; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

export class Graph1d {
  constructor(element, options = {}) {
    this.element = element;
    this.options = options;
    this.now = { selected: -1, curves: [] };
    this.differences = {};
    element.classList.add("graphs");
    this.charts = CHARTS.map(([kind, title]) => {
      const box = document.createElement("figure");
      box.className = "graph";
      box.dataset.testid = `graph-${kind}`;
      const caption = document.createElement("figcaption");
      caption.textContent = title;
      const svg = make("svg", { role: "img", "aria-label": title });
      box.append(caption, svg);
      element.append(box);
      return { kind, svg, box, legend: null };
    });
    this.work = () => this.draw();
    this.observer = new ResizeObserver(() => this.invalidate());
    this.observer.observe(element);
    this.onTheme = () => this.invalidate();
    addEventListener("studio-theme", this.onTheme);
    if (options.onMove) this.listen();
  }

  remove() {
    this.observer.disconnect();
    removeEventListener("studio-theme", this.onTheme);
    this.element.replaceChildren();
  }

  /** `at once` draws in the frame that is running, otherwise the next one does. */
  show(what, { atOnce = false } = {}) {
    this.now = { ...this.now, ...what };
    if (atOnce) this.draw();
    else this.invalidate();
  }

  invalidate() { request(this.options.work ?? this.work); }

  draw() {
    const { head, f, box } = this.now;
    if (!head || !box || this.element.clientWidth === 0) return;
    const lo = box.lo[0], hi = box.hi[0], middle = (lo + hi) / 2, { n } = head, rate = head.rates[0];
    const xs = Float64Array.from({ length: POINTS }, (_, k) => lo + (k / (POINTS - 1)) * (hi - lo));
    const net = xs.map((x) => evaluate(head, x));
    const truth = f ? xs.map((x) => f([x])) : null;
    const score = (j, x) => (head.centers[2 * j] - middle) * (x - middle) - (head.centers[2 * j] - middle) ** 2 / 2 + head.biases[j] / rate;
    const envelope = xs.map((x) => { let best = -Infinity; for (let j = 0; j < n; j += 1) best = Math.max(best, score(j, x)); return best; });
    const parts = Array.from({ length: Math.min(n, 128) }, () => new Float64Array(POINTS));
    const w = new Float64Array(n);
    for (let k = 0; k < POINTS; k += 1) { weights(head, xs[k], 0, w); for (let j = 0; j < parts.length; j += 1) parts[j][k] = w[j]; }
    const theme = themeNow(), style = (j) => ({ stroke: theme.series[1 + (j % 6)], "stroke-dasharray": DASHES[Math.floor(j / 6) % 6] });
    const curves = (this.now.curves ?? []).map(({ label, f: g }) => ({ label, ys: xs.map((x) => g(x)) }));
    this.differences = Object.fromEntries(curves.map(({ label, ys }) => [label, truth ? largest(ys.map((y, k) => y - truth[k])) : NaN]));

    for (const chart of this.charts) {
      const plot = this.frameOf(chart, lo, hi);
      if (chart.kind === "scores") {
        const [least, most] = extent(envelope), span = most - least || 1;
        plot.scale(least - 0.4 * span, most + 0.1 * span);
        plot.axes();
        plot.groups(n, (j) => (this.now.dead?.[j] ? { stroke: theme.soft, "stroke-dasharray": "3 3" } : style(j)), (j) => plot.path([lo, hi], [score(j, lo), score(j, hi)]), 1.3);
        plot.line(xs, envelope, { stroke: theme.ink, "stroke-width": 2.4 });
      } else if (chart.kind === "weights") {
        plot.scale(0, 1);
        plot.axes();
        plot.groups(parts.length, style, (j) => plot.path(xs, parts[j], 1e-3), 1.7);
      } else if (chart.kind === "values") {
        const [least, most] = extent(truth ?? net, net), span = most - least || 1;
        plot.scale(least - 0.08 * span, most + 0.14 * span);
        plot.axes();
        if (truth) plot.line(xs, truth, { stroke: theme.ink, "stroke-width": 1.6, "stroke-dasharray": "5 4" });
        curves.forEach(({ ys }, i) => plot.line(xs, ys, { stroke: theme.series[2 + (i % 5)], "stroke-width": 2, "stroke-dasharray": DASHES[1 + (i % 5)] }));
        plot.line(xs, net, { stroke: theme.accent, "stroke-width": 2.4 });
        plot.legend([["head", theme.accent, ""], ...(truth ? [["f", theme.ink, "5 4"]] : []), ...curves.map(({ label }, i) => [`${label}: at most ${shown(this.differences[label], 3)} off, seen`, theme.series[2 + (i % 5)], DASHES[1 + (i % 5)]])]);
      } else {
        const errors = truth ? net.map((y, k) => y - truth[k]) : net.map(() => NaN);
        const apart = curves.map(({ ys }) => ys.map((y, k) => y - (truth?.[k] ?? NaN)));
        const size = largest(errors) || 1e-12;
        plot.scale(-1.15 * size, 1.15 * size);
        plot.axes();
        apart.forEach((ys, i) => plot.line(xs, ys, { stroke: theme.series[2 + (i % 5)], "stroke-width": 1.6, "stroke-dasharray": DASHES[1 + (i % 5)] }));
        plot.line(xs, errors, { stroke: theme.accent, "stroke-width": 2 });
        plot.area(xs, errors, { fill: theme.accent, opacity: 0.14 });
      }
      plot.keys(chart.kind);
      plot.hover();
    }
    frame.draws += 1;
  }

  /** The plotting area of one chart: scales, axes, lines. The SVG is emptied first. */
  frameOf(chart, lo, hi) {
    const { now } = this, theme = themeNow(), { svg } = chart;
    const narrow = this.element.clientWidth < 560;
    const width = narrow ? this.element.clientWidth : Math.floor((this.element.clientWidth - 14) / 2);
    const height = Math.max(150, Math.min(narrow ? 190 : 330, this.options.maxHeight?.(narrow ? 4 : 2) ?? 260));
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    const inner = { x: PAD.left, y: 8, w: width - PAD.left - PAD.right, h: height - 8 - PAD.bottom };
    const plot = { least: 0, most: 1 };
    const toX = (x) => inner.x + ((x - lo) / (hi - lo)) * inner.w;
    const toY = (y) => inner.y + (1 - (y - plot.least) / (plot.most - plot.least)) * inner.h;
    const clipped = (y) => Math.min(inner.y + inner.h + 400, Math.max(inner.y - 400, toY(y)));
    const id = `clip-${chart.kind}`;
    const clip = make("clipPath", { id }, make("defs", {}, svg));
    make("rect", { x: inner.x, y: inner.y, width: inner.w, height: inner.h }, clip);
    const tenth = (v) => Math.round(10 * v) / 10;
    const path = (xs, ys, faint = -Infinity) => {
      let text = "", open = false;
      for (let k = 0; k < xs.length; k += 1) {
        const near = ys[k] > faint || ys[k - 1] > faint || ys[k + 1] > faint;
        if (!Number.isFinite(ys[k]) || (faint > -Infinity && !near)) { open = false; continue; }
        text += `${open ? "L" : "M"}${tenth(toX(xs[k]))} ${tenth(clipped(ys[k]))}`;
        open = true;
      }
      return text;
    };
    const circle = (x, y, r) => `M${tenth(x - r)} ${tenth(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
    Object.assign(plot, {
      path,
      /** One path element per style, and one for the selected key, whatever the number of keys. */
      groups: (count, styleOf, pathOf, width) => {
        const found = new Map();
        for (let j = 0; j < count; j += 1) {
          const chosen = j === now.selected, style = styleOf(j), key = `${style.stroke} ${style["stroke-dasharray"]} ${chosen}`;
          if (!found.has(key)) found.set(key, { style, chosen, text: "" });
          found.get(key).text += pathOf(j);
        }
        for (const { style, chosen, text } of found.values()) make("path", { d: text, fill: "none", "clip-path": `url(#${id})`, "stroke-width": chosen ? width + 1.4 : width, ...style }, svg);
      },
      scale: (least, most) => { plot.least = least; plot.most = most; chart.view = { inner, lo, hi, least, most }; },
      axes: () => {
        for (const t of ticks(plot.least, plot.most)) {
          make("line", { x1: inner.x, x2: inner.x + inner.w, y1: toY(t), y2: toY(t), stroke: theme.rule }, svg);
          make("text", { x: inner.x - 6, y: toY(t) + 3.5, "text-anchor": "end", class: "tick" }, svg).textContent = shown(t, 3);
        }
        for (const t of ticks(lo, hi, 5)) make("text", { x: toX(t), y: height - 5, "text-anchor": "middle", class: "tick" }, svg).textContent = shown(t, 3);
        make("line", { x1: inner.x, x2: inner.x + inner.w, y1: inner.y + inner.h, y2: inner.y + inner.h, stroke: theme.soft }, svg);
      },
      line: (xs, ys, attributes) => make("path", { d: path(xs, ys), fill: "none", "stroke-linejoin": "round", "clip-path": `url(#${id})`, ...attributes }, svg),
      area: (xs, ys, attributes) => make("path", { d: `${path(xs, ys)}L${toX(hi)} ${toY(0)}L${toX(lo)} ${toY(0)}Z`, "clip-path": `url(#${id})`, ...attributes }, svg),
      legend: (rows) => rows.forEach(([label, stroke, dash], i) => {
        make("line", { x1: inner.x + 8, x2: inner.x + 32, y1: inner.y + 10 + 15 * i, y2: inner.y + 10 + 15 * i, stroke, "stroke-width": 2.4, "stroke-dasharray": dash }, svg);
        make("text", { x: inner.x + 38, y: inner.y + 14 + 15 * i, class: "tick" }, svg).textContent = label;
      }),
      keys: (kind) => {
        const { head } = now;
        if (head.n > 128) return;
        const texts = { alive: "", dead: "", chosen: "" };
        for (let j = 0; j < head.n; j += 1) {
          const c = head.centers[2 * j], chosen = j === now.selected;
          if (c < lo || c > hi) continue;
          const y = kind === "values" ? clipped(valueOf(head, j, c, 0)) : inner.y + inner.h;
          if (chosen) make("line", { x1: toX(c), x2: toX(c), y1: inner.y, y2: inner.y + inner.h, stroke: theme.accent, "stroke-dasharray": "2 3" }, svg);
          texts[chosen ? "chosen" : now.dead?.[j] ? "dead" : "alive"] += circle(toX(c), y, chosen ? 6.5 : 4.5);
        }
        const paints = { alive: [theme.ink, theme.background], dead: [theme.background, theme.soft], chosen: [theme.accent, theme.background] };
        for (const [name, [fill, stroke]] of Object.entries(paints)) if (texts[name]) make("path", { d: texts[name], fill, stroke, "stroke-width": 2, class: `dot ${name}` }, svg);
      },
      hover: () => { if (now.hover) make("line", { x1: toX(now.hover[0]), x2: toX(now.hover[0]), y1: inner.y, y2: inner.y + inner.h, stroke: theme.soft }, svg); },
    });
    return plot;
  }

  /** The key near a pointer in a chart, or -1. */
  keyNear(chart, event) {
    const { head } = this.now, { inner, lo, hi } = chart.view ?? {};
    if (!inner || head.n > 128) return -1;
    const frameOf = chart.svg.getBoundingClientRect(), x = event.clientX - frameOf.left;
    let best = -1, nearest = REACH;
    for (let j = 0; j < head.n; j += 1) {
      const away = Math.abs(inner.x + ((head.centers[2 * j] - lo) / (hi - lo)) * inner.w - x);
      if (away < nearest) { nearest = away; best = j; }
    }
    return best;
  }

  pointOf(chart, event) {
    const { inner, lo, hi, least, most } = chart.view, frameOf = chart.svg.getBoundingClientRect();
    const s = (event.clientX - frameOf.left - inner.x) / inner.w, t = (event.clientY - frameOf.top - inner.y) / inner.h;
    return { x: Math.min(hi, Math.max(lo, lo + s * (hi - lo))), y: most - t * (most - least), inside: s >= 0 && s <= 1 };
  }

  /** Where a key stands in the page, in the first chart. */
  placeOf(j) {
    const [chart] = this.charts, { inner, lo, hi } = chart.view, frameOf = chart.svg.getBoundingClientRect();
    return { x: frameOf.left + inner.x + ((this.now.head.centers[2 * j] - lo) / (hi - lo)) * inner.w, y: frameOf.top + inner.y + inner.h };
  }

  listen() {
    const { options } = this;
    for (const chart of this.charts) {
      let drag = null, lastTap = null;
      chart.svg.addEventListener("touchstart", (event) => { if (this.keyNear(chart, event.touches[0]) >= 0) event.preventDefault(); }, { passive: false });
      chart.svg.addEventListener("pointerdown", (event) => {
        if (event.button > 0 || !chart.view) return;
        const j = this.keyNear(chart, event);
        drag = { j, x: event.clientX, y: event.clientY, moved: false };
        if (j >= 0) { chart.svg.setPointerCapture(event.pointerId); options.onSelect?.(j); }
      });
      chart.svg.addEventListener("pointermove", (event) => {
        if (!chart.view) return;
        const point = this.pointOf(chart, event);
        options.onHover?.(point.inside ? [point.x] : null);
        if (!drag || drag.j < 0 || (!drag.moved && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < 3)) return;
        drag.moved = true;
        drag.point = point;
        this.moveTo(chart, drag, "move");
      });
      const end = (event) => {
        if (!drag) return;
        const { j, moved } = drag;
        if (moved) this.moveTo(chart, drag, "end");
        else if (event.type === "pointerup" && j < 0) {
          const tap = { time: event.timeStamp, x: event.clientX };
          if (lastTap && tap.time - lastTap.time < 400 && Math.abs(tap.x - lastTap.x) < 20) { options.onAdd?.([this.pointOf(chart, event).x]); lastTap = null; } else lastTap = tap;
        }
        drag = null;
      };
      chart.svg.addEventListener("pointerup", end);
      chart.svg.addEventListener("pointercancel", end);
      chart.svg.addEventListener("pointerleave", () => { if (!drag) options.onHover?.(null); });
    }
    const { element } = this;
    element.tabIndex = 0;
    element.setAttribute("role", "application");
    element.setAttribute("aria-label", options.label ?? "Graphs of the head. Left and right arrows move the selected key, Shift moves it further, Page Up and Page Down choose a key, Insert adds one, Delete removes it.");
    element.addEventListener("keydown", (event) => {
      const { head, box } = this.now;
      if (!head || event.altKey || event.ctrlKey || event.metaKey) return;
      const j = Math.max(0, options.selected?.() ?? this.now.selected), way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (way) options.onStep?.(j, [way * (event.shiftKey ? 0.1 : 0.01) * (box.hi[0] - box.lo[0])]);
      else if (event.key === "PageDown" || event.key === "PageUp") options.onSelect?.((j + (event.key === "PageDown" ? 1 : head.n - 1)) % head.n);
      else if (event.key === "Delete" || event.key === "Backspace") options.onRemove?.(j);
      else if (event.key === "Insert") options.onAdd?.(null);
      else return;
      event.preventDefault();
    });
  }

  moveTo(chart, drag, phase) {
    if (chart.kind === "values" && this.now.canSetValues) this.options.onValue?.(drag.j, [drag.point.x], drag.point.y, phase);
    else this.options.onMove(drag.j, [drag.point.x], phase);
  }
}

function extent(...lists) {
  let lo = Infinity, hi = -Infinity;
  for (const list of lists) for (const v of list) if (Number.isFinite(v)) { lo = Math.min(lo, v); hi = Math.max(hi, v); }
  return lo <= hi ? [lo, hi] : [0, 1];
}

function largest(list) {
  let most = 0;
  for (const v of list) if (Number.isFinite(v)) most = Math.max(most, Math.abs(v));
  return most;
}
