/**
 * The pictures without WebGL2: the interface of painter_gl.js on a 2-D canvas. Numbers are computed in float64 script, a
 * coarse picture at once and finer ones in slices between frames; borders of cells are drawn from their polygons.
 */

import { MAPS, channels, colourAt } from "./colours.js";
import { request, slices } from "./frame.js";
import { compileNodes } from "./graph.js";
import { cellsOf, evaluate, exponents, valueOf, weights } from "./head.js";

const STEPS = [24, 64, 160]; // samples per axis, coarse to fine
const table = Object.fromEntries(Object.keys(MAPS).map((map) => [map, Uint8ClampedArray.from({ length: 768 }, (_, k) => colourAt(map, Math.floor(k / 3) / 255)[k % 3])]));
const bytes = (hex) => channels(hex).map((c) => 255 * c);

export class CanvasPainter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.kind = "canvas";
    this.draws = 0;
    this.f = null;
    this.head = null;
    this.field = null;
    this.images = new Map();
    this.stop = () => {};
  }

  setFunction(graph, output = 0) {
    this.f = graph ? compileNodes(graph, output) : null;
    this.dirty = true; // the old image stays until the next paint: compose may run before it
    return this.f !== null;
  }

  setHead(head, dead = null) {
    Object.assign(this, { head, dead });
    this.dirty = true;
  }

  setField(field) {
    this.field = field;
    this.dirty = true;
  }

  resize(width, height, ratio) {
    const w = Math.max(1, Math.round(width * ratio)), h = Math.max(1, Math.round(height * ratio));
    if (this.canvas.width !== w || this.canvas.height !== h) { this.canvas.width = w; this.canvas.height = h; }
  }

  paint(scene) {
    const key = JSON.stringify([scene.box, scene.valueRange, scene.errorRange, scene.tint, scene.theme.ink, scene.panes.map((p) => p.kind)]);
    if (this.dirty || key !== this.sceneKey) {
      this.sceneKey = key;
      this.dirty = false;
      this.stop();
      this.start(scene);
    }
    this.scene = scene;
    this.compose();
  }

  /** Fills the images of the panes: the coarse ones now, the finer ones in slices. */
  start(scene) {
    const kinds = [...new Set(scene.panes.map((pane) => pane.kind))];
    this.fill(kinds, scene, STEPS[0]);
    let level = 1, row = 0, made = null;
    this.stop = slices(() => {
      const n = STEPS[level];
      made ??= kinds.map((kind) => new ImageData(n, n));
      kinds.forEach((kind, i) => this.fillRow(kind, made[i], row, n, scene));
      row += 1;
      if (row < n) return false;
      kinds.forEach((kind, i) => this.keep(kind, made[i]));
      request(this.again ??= () => this.compose());
      [made, row, level] = [null, 0, level + 1];
      return level >= STEPS.length;
    });
  }

  fill(kinds, scene, n) {
    for (const kind of kinds) {
      const image = new ImageData(n, n);
      for (let row = 0; row < n; row += 1) this.fillRow(kind, image, row, n, scene);
      this.keep(kind, image);
    }
  }

  keep(kind, image) {
    const surface = document.createElement("canvas");
    surface.width = surface.height = image.width;
    surface.getContext("2d").putImageData(image, 0, 0);
    this.images.set(kind, surface);
  }

  /** Row 0 is the upper edge of the picture. */
  fillRow(kind, image, row, n, scene) {
    const { lo, hi } = scene.box, y = hi[1] - ((row + 0.5) / n) * (hi[1] - lo[1]);
    for (let k = 0; k < n; k += 1) {
      const x = lo[0] + ((k + 0.5) / n) * (hi[0] - lo[0]);
      const colour = this.colour(kind, x, y, (k + 0.5) / n, 1 - (row + 0.5) / n, scene);
      const at = 4 * (row * n + k);
      image.data[at] = colour[0];
      image.data[at + 1] = colour[1];
      image.data[at + 2] = colour[2];
      image.data[at + 3] = 255;
    }
  }

  colour(kind, x, y, shareX, shareY, scene) {
    const [least, most] = scene.valueRange;
    if (kind === "cells") return this.cellColour(x, y, shareX, shareY, scene);
    const number = this.number(kind, x, y, shareX, shareY);
    if (!Number.isFinite(number)) return bytes((Math.floor((shareX - shareY) * 40) & 3) === 0 ? scene.theme.soft : scene.theme.panel);
    return kind === "error" ? looked("signed", 0.5 + (0.5 * number) / scene.errorRange) : looked("value", (number - least) / (most - least));
  }

  number(kind, x, y, shareX, shareY) {
    const { field } = this;
    if (field?.[kind]) return field[kind][sampleAt(field.n, shareX, shareY)];
    const f = () => (field?.function ? field.function[sampleAt(field.n, shareX, shareY)] : this.f ? this.f([x, y]) : NaN);
    if (kind === "function") return f();
    const net = field?.head ? field.head[sampleAt(field.n, shareX, shareY)] : this.head ? evaluate(this.head, x, y) : NaN;
    return kind === "head" ? net : net - f();
  }

  cellColour(x, y, shareX, shareY, scene) {
    const { head, field } = this;
    if (!head) return bytes(scene.theme.panel);
    const winner = field?.winner ? field.winner[sampleAt(field.n, shareX, shareY)] : weights(head, x, y, head.scratch);
    const share = field?.winner ? 1 : head.scratch[winner];
    const [least, most] = scene.valueRange, paper = bytes(scene.theme.background);
    const tint = scene.tint === "key" ? bytes(scene.theme.tints[winner % 6]) : looked("value", (valueOf(head, winner, x, y) - least) / (most - least));
    return tint.map((c, i) => paper[i] + (0.35 + 0.65 * share) * (c - paper[i]));
  }

  compose() {
    const { context, scene } = this, { ratio } = scene;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = true;
    const cells = this.head && this.head.m === 2 ? cellsOf(this.head, scene.box) : null;
    for (const { kind, x, y, size } of scene.panes) {
      context.save();
      context.beginPath();
      context.roundRect(x, y, size, size, 7);
      context.clip();
      context.drawImage(this.images.get(kind), x, y, size, size);
      const toX = (a) => x + ((a - scene.box.lo[0]) / (scene.box.hi[0] - scene.box.lo[0])) * size;
      const toY = (b) => y + ((scene.box.hi[1] - b) / (scene.box.hi[1] - scene.box.lo[1])) * size;
      if (kind === "cells") this.borders(cells, toX, toY, scene.theme);
      if (kind !== "function" && (scene.dots ?? true)) this.dots(kind, toX, toY, scene);
      context.restore();
    }
    this.draws = 1;
  }

  borders(cells, toX, toY, theme) {
    const { context } = this;
    context.strokeStyle = theme.ink;
    context.lineWidth = 1.3;
    cells?.polygons.forEach((polygon, j) => {
      if (cells.dead[j]) return;
      context.beginPath();
      for (let i = 0; i < polygon.length; i += 2) context.lineTo(toX(polygon[i]), toY(polygon[i + 1]));
      context.closePath();
      context.stroke();
    });
  }

  dots(kind, toX, toY, { theme, selected }) {
    const { context, head, dead } = this;
    if (!head || head.n > 600) return;
    for (let j = 0; j < head.n; j += 1) {
      const radius = j === selected ? 7 : kind === "cells" ? 5 : 3.5;
      context.beginPath();
      context.arc(toX(head.centers[2 * j]), toY(head.centers[2 * j + 1]), radius, 0, 2 * Math.PI);
      context.fillStyle = j === selected ? theme.accent : dead?.[j] ? theme.background : theme.ink;
      context.strokeStyle = dead?.[j] && j !== selected ? theme.soft : theme.background;
      context.lineWidth = 2;
      context.fill();
      context.stroke();
    }
  }

  /** The numbers of one pane at n x n points, rows from the lower edge. */
  read(kind, n, box) {
    const out = new Float32Array(n * n);
    for (let k = 0; k < n * n; k += 1) {
      const s = ((k % n) + 0.5) / n, t = (Math.floor(k / n) + 0.5) / n;
      const x = box.lo[0] + s * (box.hi[0] - box.lo[0]), y = box.lo[1] + t * (box.hi[1] - box.lo[1]);
      out[k] = kind === "cells" ? exponents(this.head, x, y, this.head.scratch) : this.number(kind, x, y, s, t);
    }
    return out;
  }
}

const sampleAt = (n, s, t) => Math.min(n - 1, Math.floor(t * n)) * n + Math.min(n - 1, Math.floor(s * n));

function looked(map, t) {
  const k = 3 * Math.round(255 * Math.min(1, Math.max(0, t)));
  return [table[map][k], table[map][k + 1], table[map][k + 2]];
}
