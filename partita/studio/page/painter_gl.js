/**
 * The pictures by WebGL2: every pane of one canvas in one draw call. The same interface as painter_canvas.js:
 *
 *     GlPainter.create(canvas)     a painter, or null where there is no WebGL2
 *     setFunction(graph, output)   compiles f into the shader; false where it cannot (then give a field)
 *     setHead(head, dead)          uploads the keys (head of head.js, dead flags or null)
 *     setField(field)              {n, function, head, error, winner}: Float32Arrays of n x n samples at the middles of
 *                                  n x n squares, rows from the lower edge, or null for what the shader computes itself
 *     paint(scene)                 {panes: [{kind, x, y, size}] in CSS pixels, ratio, box, valueRange, errorRange, tint,
 *                                  selected, theme}; kind is "cells", "head", "function" or "error" (head - f)
 *     read(kind, n, box)           the float32 numbers of one pane at n x n points, rows from the lower edge (for tests)
 *     draws                        draw calls of the last paint: 1
 *
 * Precision. Centers and the point are taken relative to the middle of the box in float64 before they are rounded, the
 * differences z - c come first (scaled by the root of R/2), exponents are relative to the largest and values to the middle of their range. With u = 2^-24, S the largest half side of the box
 * plus the largest |c - middle|, the error of an exponent is at most about u (4 R S |z - c| + 4 |E_j| + |b_j|), which is the
 * relative error of a weight; the head then errs by at most twice the largest of these over keys that matter, times the
 * spread of the values, plus 8 u max |V_j|. Tests hold the pixels to that. Where it is too coarse for the picture, the
 * numbers come as a field from float64 script (picture.js measures this).
 */

import { channels, colourAt } from "./colours.js";
import { glsl } from "./graph.js";

const MOST_KEYS = 512; // two vectors each: what every device allows in a uniform block
const KINDS = { cells: 0, head: 1, function: 2, error: 3 };
const MAP_ROWS = ["value", "signed", "error", "weight"];

/** Uniforms of both shaders. keys[2j] = (scaled center, bias, value), keys[2j + 1] = (slope per scaled unit, dead). */
const SHARED = `#version 300 es
precision highp float;
precision highp int;
layout(std140) uniform Keys { vec4 keys[${2 * MOST_KEYS}]; };
uniform vec4 uPanes[4];
uniform int uPaneCount, uCount, uSelected;
uniform vec2 uHalf;
uniform float uRatio;
`;

/** Three corners that cover the canvas, then a small square per pane and key for its dot; the selected key comes last. */
const VERTEX = `${SHARED}
uniform vec2 uCanvas;
flat out int vDot, vPane;
out vec2 vAt;
void main() {
  vDot = -1;
  vPane = 0;
  vAt = vec2(0.0);
  if (gl_VertexID < 3) { gl_Position = vec4(vec2(gl_VertexID & 1, gl_VertexID >> 1) * 4.0 - 1.0, 0.0, 1.0); return; }
  int k = gl_VertexID - 3, corner = k % 6, quad = k / 6;
  vPane = quad / uCount;
  vDot = (quad % uCount + uSelected + 1) % uCount;
  vec2 side = vec2(corner == 1 || corner == 2 || corner == 4 ? 1.0 : -1.0, corner == 2 || corner == 4 || corner == 5 ? 1.0 : -1.0);
  vec4 pane = uPanes[vPane];
  vec2 place = pane.xy + (keys[2 * vDot].xy / uHalf * 0.5 + 0.5) * pane.z;
  vAt = side * 10.0 * uRatio;
  bool hidden = int(pane.w) == 2 || any(lessThan(place, pane.xy - 0.5)) || any(greaterThan(place, pane.xy + pane.z + 0.5));
  gl_Position = hidden ? vec4(2.0, 2.0, 2.0, 1.0) : vec4((place + vAt) / uCanvas * 2.0 - 1.0, 0.0, 1.0);
}`;

const FRAGMENT = (source) => `${SHARED}
precision highp sampler2D;
uniform sampler2D uField, uMaps;
uniform int uTint, uFieldSize;
uniform bool uHard, uAffine, uRaw;
uniform bvec4 uFromField;
uniform vec2 uMiddle, uScale, uValueRange;
uniform float uErrorRange, uOffset;
uniform vec3 uInk, uPaper, uSoft, uAccent, uPanel;
flat in int vDot, vPane;
in vec2 vAt;
out vec4 colour;
${source ?? "#define P_NAN uintBitsToFloat(0x7fc00000u)\nbool p_bad(float x) { return (floatBitsToUint(x) & 0x7f800000u) == 0x7f800000u; }\nfloat partitaF(vec2 z) { return P_NAN; }"}

float valueAt(vec2 z, int j) { return uAffine ? keys[2 * j].w + dot(keys[2 * j + 1].xy, z - keys[2 * j].xy) : keys[2 * j].w; }

vec4 field(vec2 share) {
  vec2 place = share * float(uFieldSize) - 0.5, low = floor(place), t = place - low;
  ivec2 top = ivec2(uFieldSize - 1), a = clamp(ivec2(low), ivec2(0), top), b = clamp(ivec2(low) + 1, ivec2(0), top);
  vec4 under = mix(texelFetch(uField, a, 0), texelFetch(uField, ivec2(b.x, a.y), 0), t.x);
  return mix(under, mix(texelFetch(uField, ivec2(a.x, b.y), 0), texelFetch(uField, b, 0), t.x), t.y);
}
int fieldWinner(vec2 share) {
  ivec2 k = clamp(ivec2(share * float(uFieldSize)), ivec2(0), ivec2(uFieldSize - 1));
  return int(texelFetch(uField, k, 0).w + 0.5);
}

vec3 mapped(int row, float t) {
  float place = clamp(t, 0.0, 1.0) * 255.0;
  int k = int(place);
  return mix(texelFetch(uMaps, ivec2(k, row), 0).rgb, texelFetch(uMaps, ivec2(min(k + 1, 255), row), 0).rgb, place - float(k));
}

/** The dot of a key: a disc with a ring, hollow and grey for a dead key, larger in the accent colour for the selected one. */
vec4 dotColour() {
  bool chosen = vDot == uSelected, dead = keys[2 * vDot + 1].z > 0.5;
  float radius = (chosen ? 7.0 : int(uPanes[vPane].w) == 0 ? 5.0 : 3.5) * uRatio, far = length(vAt);
  vec3 paint = mix(uPaper, chosen ? uAccent : dead ? uSoft : uInk, clamp(radius + 0.5 - far, 0.0, 1.0));
  if (dead) paint = mix(paint, uPaper, clamp(radius - 2.0 * uRatio + 0.5 - far, 0.0, 1.0));
  float cover = clamp(radius + 1.75 * uRatio + 0.5 - far, 0.0, 1.0);
  return vec4(paint * cover, cover);
}

void main() {
  if (vDot >= 0) { colour = dotColour(); return; }
  vec2 pixel = gl_FragCoord.xy;
  int pane = -1;
  for (int i = 0; i < uPaneCount; i++) {
    if (all(greaterThanEqual(pixel, uPanes[i].xy)) && all(lessThan(pixel, uPanes[i].xy + uPanes[i].z))) pane = i;
  }
  colour = vec4(0.0);
  if (pane < 0) return;
  float size = uPanes[pane].z;
  int kind = int(uPanes[pane].w);
  vec2 share = (pixel - uPanes[pane].xy) / size;
  vec2 z = (2.0 * share - 1.0) * uHalf; // scaled so that an exponent is bias - |z - center|^2

  float first = -1e38, second = -1e38, sum = 0.0, above = 0.0, own = 0.0;
  int winner = 0, runner = 0;
  bool lookup = kind != 2 && !(uFromField.w && kind == 0) && !(uFromField.y && kind == 1) && !(uFromField.z && kind == 3);
  if (lookup) {
    for (int j = 0; j < uCount; j++) {
      vec4 key = keys[2 * j];
      vec2 d = z - key.xy;
      float e = key.z - dot(d, d);
      bool won = e > first;
      runner = won ? winner : (e > second ? j : runner); // the runner-up decides where the border lies
      second = won ? first : max(second, e);
      winner = won ? j : winner;
      first = max(first, e);
    }
    own = valueAt(z, winner);
    sum = 1.0;
    if (!uHard && first - second < 30.0) {
      sum = 0.0;
      for (int j = 0; j < uCount; j++) {
        vec4 key = keys[2 * j];
        vec2 d = z - key.xy;
        float e = key.z - dot(d, d) - first;
        if (e > -30.0) {
          float w = exp(e);
          sum += w;
          above += w * ((uAffine ? key.w + dot(keys[2 * j + 1].xy, d) : key.w) - own);
        }
      }
    }
  }

  float number = 0.0, head = 0.0, share1 = 1.0;
  if (lookup) {
    head = (uHard ? own : own + above / sum) + uOffset;
    own += uOffset;
    share1 = uHard ? 1.0 : 1.0 / sum;
  }
  vec4 sampled = uFieldSize > 0 ? field(share) : vec4(0.0);
  float f = kind == 2 || kind == 3 ? (uFromField.x ? sampled.x : partitaF(uMiddle + z * uScale)) : 0.0;
  if (uFromField.y) head = sampled.y;
  if (uFromField.w && kind == 0) winner = fieldWinner(share);
  number = kind == 0 ? float(winner) : kind == 1 ? head : kind == 2 ? f : (uFromField.z ? sampled.z : head - f);
  if (uRaw) { colour = vec4(number, share1, 0.0, 1.0); return; }

  vec3 paint;
  if (kind == 0) {
    if (!lookup) own = head;
    paint = uTint == 1 ? texelFetch(uMaps, ivec2(winner % 6, ${MAP_ROWS.length}), 0).rgb : mapped(0, (own - uValueRange.x) / (uValueRange.y - uValueRange.x));
    paint = mix(uPaper, paint, 0.35 + 0.65 * share1);
    if (lookup && uCount > 1) {
      vec2 across = 2.0 * (keys[2 * winner].xy - keys[2 * runner].xy) * 2.0 * uHalf / size;
      float away = (first - second) / max(length(across), 1e-30);
      paint = mix(uInk, paint, clamp(away / uRatio - 0.35, 0.0, 1.0) * 0.85 + 0.15);
    }
  } else if (p_bad(number)) {
    paint = mod((pixel.x + pixel.y) / uRatio, 9.0) < 2.0 ? uSoft : uPanel;
  } else {
    paint = kind == 3 ? mapped(1, 0.5 + 0.5 * number / uErrorRange) : mapped(0, (number - uValueRange.x) / (uValueRange.y - uValueRange.x));
  }

  float corner = 7.0 * uRatio;
  vec2 q = abs(pixel - uPanes[pane].xy - 0.5 * size) - 0.5 * size + corner;
  float cover = clamp(0.5 + corner - length(max(q, 0.0)), 0.0, 1.0);
  colour = vec4(paint * cover, cover);
}`;

export class GlPainter {
  static create(canvas) {
    const gl = canvas.getContext("webgl2", { alpha: true, premultipliedAlpha: true, antialias: false, depth: false, stencil: false, preserveDrawingBuffer: false });
    if (!gl) return null;
    try { return new GlPainter(gl); } catch (error) { console.warn(error); return null; }
  }

  constructor(gl) {
    this.gl = gl;
    this.kind = "webgl2";
    this.draws = 0;
    this.programs = new Map();
    this.head = null;
    this.field = null;
    this.middle = [0, 0];
    this.keyData = new Float32Array(8 * MOST_KEYS);
    gl.bindBufferBase(gl.UNIFORM_BUFFER, 0, gl.createBuffer());
    gl.bufferData(gl.UNIFORM_BUFFER, this.keyData.byteLength, gl.DYNAMIC_DRAW);
    this.software = /swiftshader|llvmpipe|software/i.test(rendererOf(gl));
    this.samples = texture(gl);
    this.maps = texture(gl);
    this.theme = null;
    gl.bindVertexArray(gl.createVertexArray());
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    this.lost = false;
    gl.canvas.addEventListener("webglcontextlost", (event) => { event.preventDefault(); this.lost = true; });
    this.program = null;
    if (!this.software) this.use(null); // says early whether the driver compiles it; in software that takes long and is known to work
  }

  /** The program for a function's source, compiled once; the last eight are kept. */
  use(source) {
    const { gl } = this;
    let program = this.programs.get(source);
    if (!program) {
      program = { handle: linked(gl, FRAGMENT(source)), at: {} };
      gl.uniformBlockBinding(program.handle, gl.getUniformBlockIndex(program.handle, "Keys"), 0);
      const count = gl.getProgramParameter(program.handle, gl.ACTIVE_UNIFORMS);
      for (let k = 0; k < count; k += 1) {
        const name = gl.getActiveUniform(program.handle, k).name;
        program.at[name.replace(/\[0\]$/, "")] = gl.getUniformLocation(program.handle, name);
      }
      this.programs.set(source, program);
      for (const [old, { handle }] of this.programs) {
        if (this.programs.size <= 8) break;
        if (old !== source && old !== null) { gl.deleteProgram(handle); this.programs.delete(old); }
      }
    }
    gl.useProgram(program.handle);
    this.program = program;
    return program;
  }

  setFunction(graph, output = 0) {
    const source = graph ? glsl(graph, output) : null;
    try {
      this.use(source);
    } catch (error) {
      console.warn(error);
      this.use(null);
      return false;
    }
    return source !== null;
  }

  setHead(head, dead = null) {
    this.head = head;
    this.dead = dead;
    this.uploaded = false;
  }

  /** Keys relative to the middle of the box, scaled by the root of half the rate, then rounded to float32. */
  upload(middle) {
    const { gl, head } = this;
    this.middle = middle;
    this.uploaded = true;
    this.scale = [0, 1].map((i) => (head && head.rates[i] > 0 ? Math.sqrt(head.rates[i] / 2) : 1));
    if (!head) return;
    const data = this.keyData, n = Math.min(head.n, MOST_KEYS);
    let base = -Infinity, least = Infinity, most = -Infinity;
    for (let j = 0; j < n; j += 1) {
      base = Math.max(base, head.biases[j]);
      least = Math.min(least, head.values[j]);
      most = Math.max(most, head.values[j]);
    }
    this.offset = Math.fround((least + most) / 2);
    for (let j = 0; j < n; j += 1) {
      const k = 8 * j;
      data[k] = (head.centers[2 * j] - middle[0]) * this.scale[0];
      data[k + 1] = (head.centers[2 * j + 1] - middle[1]) * this.scale[1];
      data[k + 2] = head.biases[j] - base;
      data[k + 3] = head.values[j] - this.offset;
      data[k + 4] = head.slopes ? head.slopes[2 * j] / this.scale[0] : 0;
      data[k + 5] = head.slopes ? head.slopes[2 * j + 1] / this.scale[1] : 0;
      data[k + 6] = this.dead?.[j] ? 1 : 0;
    }
    gl.bufferSubData(gl.UNIFORM_BUFFER, 0, data, 0, 8 * n);
  }

  setField(field) {
    this.field = field;
    if (!field) return;
    const { gl } = this, { n } = field;
    const data = new Float32Array(4 * n * n);
    [field.function, field.head, field.error, field.winner].forEach((part, channel) => {
      if (part) for (let k = 0; k < n * n; k += 1) data[4 * k + channel] = part[k];
    });
    gl.bindTexture(gl.TEXTURE_2D, this.samples);
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA32F, n, n, 0, gl.RGBA, gl.FLOAT, data);
  }

  setTheme(theme) {
    if (this.theme === theme) return;
    this.theme = theme;
    const { gl } = this;
    const data = new Uint8Array(4 * 256 * (MAP_ROWS.length + 1)).fill(255);
    MAP_ROWS.forEach((map, row) => { for (let k = 0; k < 256; k += 1) data.set(colourAt(map, k / 255), 4 * (256 * row + k)); });
    theme.tints.forEach((hex, k) => data.set(channels(hex).map((c) => Math.round(255 * c)), 4 * (256 * MAP_ROWS.length + k)));
    gl.bindTexture(gl.TEXTURE_2D, this.maps);
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA8, 256, MAP_ROWS.length + 1, 0, gl.RGBA, gl.UNSIGNED_BYTE, data);
  }

  resize(width, height, ratio) {
    const { canvas } = this.gl;
    const w = Math.max(1, Math.round(width * ratio)), h = Math.max(1, Math.round(height * ratio));
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  }

  paint(scene) {
    const { gl } = this, { panes, ratio } = scene;
    const height = gl.canvas.height;
    this.panes ??= new Float32Array(16);
    panes.slice(0, 4).forEach((pane, i) => {
      const size = Math.round(pane.size * ratio);
      this.panes[4 * i] = Math.round(pane.x * ratio);
      this.panes[4 * i + 1] = height - Math.round(pane.y * ratio) - size;
      this.panes[4 * i + 2] = size;
      this.panes[4 * i + 3] = KINDS[pane.kind];
    });
    this.setTheme(scene.theme);
    gl.viewport(0, 0, gl.canvas.width, height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.enable(gl.BLEND);
    this.draw(scene, Math.min(panes.length, 4), false);
    gl.disable(gl.BLEND);
  }

  draw(scene, paneCount, raw) {
    const { gl, head, field } = this, { at } = this.program ?? this.use(null), { box, theme } = scene;
    const middle = [0, 1].map((i) => (box.lo[i] + box.hi[i]) / 2);
    if (!this.uploaded || middle[0] !== this.middle[0] || middle[1] !== this.middle[1]) this.upload(middle);
    gl.activeTexture(gl.TEXTURE1);
    gl.bindTexture(gl.TEXTURE_2D, this.maps);
    gl.activeTexture(gl.TEXTURE0);
    gl.bindTexture(gl.TEXTURE_2D, this.samples);
    gl.uniform1i(at.uField, 0);
    gl.uniform1i(at.uMaps, 1);
    gl.uniform4fv(at.uPanes, this.panes);
    gl.uniform1i(at.uPaneCount, paneCount);
    gl.uniform1i(at.uCount, head ? Math.min(head.n, MOST_KEYS) : 0);
    gl.uniform1i(at.uTint, scene.tint === "key" ? 1 : 0);
    gl.uniform1i(at.uSelected, scene.selected ?? -1);
    gl.uniform1i(at.uFieldSize, field ? field.n : 0);
    gl.uniform1i(at.uHard, head?.hard ? 1 : 0);
    gl.uniform1i(at.uAffine, head?.slopes ? 1 : 0);
    gl.uniform1i(at.uRaw, raw ? 1 : 0);
    gl.uniform4i(at.uFromField, Number(!!field?.function), Number(!!field?.head), Number(!!field?.error), Number(!!field?.winner));
    gl.uniform2f(at.uMiddle, middle[0], middle[1]);
    gl.uniform2f(at.uHalf, (this.scale[0] * (box.hi[0] - box.lo[0])) / 2, (this.scale[1] * (box.hi[1] - box.lo[1])) / 2);
    gl.uniform2f(at.uScale, 1 / this.scale[0], 1 / this.scale[1]);
    gl.uniform2f(at.uCanvas, gl.canvas.width, gl.canvas.height);
    gl.uniform2f(at.uValueRange, scene.valueRange?.[0] ?? 0, scene.valueRange?.[1] ?? 1);
    gl.uniform1f(at.uErrorRange, scene.errorRange ?? 1);
    gl.uniform1f(at.uOffset, this.offset ?? 0);
    gl.uniform1f(at.uRatio, scene.ratio ?? 1);
    if (theme) for (const [name, colour] of [["uInk", theme.ink], ["uPaper", theme.background], ["uSoft", theme.soft], ["uAccent", theme.accent], ["uPanel", theme.panel]]) gl.uniform3fv(at[name], channelsOf(colour));
    const dots = !raw && (scene.dots ?? true) && head && head.n <= MOST_KEYS ? head.n * paneCount : 0;
    gl.drawArrays(gl.TRIANGLES, 0, 3 + 6 * dots);
    this.draws = 1;
  }

  read(kind, n, box) {
    const { gl } = this;
    if (!gl.getExtension("EXT_color_buffer_float")) return null;
    const target = texture(gl), frame = gl.createFramebuffer();
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA32F, n, n, 0, gl.RGBA, gl.FLOAT, null);
    gl.bindFramebuffer(gl.FRAMEBUFFER, frame);
    gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, target, 0);
    gl.viewport(0, 0, n, n);
    this.panes ??= new Float32Array(16);
    this.panes.set([0, 0, n, KINDS[kind]]);
    this.draw({ box }, 1, true);
    const pixels = new Float32Array(4 * n * n);
    gl.readPixels(0, 0, n, n, gl.RGBA, gl.FLOAT, pixels);
    gl.bindFramebuffer(gl.FRAMEBUFFER, null);
    gl.deleteFramebuffer(frame);
    gl.deleteTexture(target);
    return pixels.filter((_, k) => k % 4 === 0);
  }
}

function rendererOf(gl) {
  const info = gl.getExtension("WEBGL_debug_renderer_info");
  return String(gl.getParameter(info ? info.UNMASKED_RENDERER_WEBGL : gl.RENDERER));
}

const remembered = new Map();
function channelsOf(hex) {
  if (!remembered.has(hex)) remembered.set(hex, new Float32Array(channels(hex)));
  return remembered.get(hex);
}

function texture(gl) {
  const made = gl.createTexture();
  gl.bindTexture(gl.TEXTURE_2D, made);
  for (const name of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, name, gl.NEAREST);
  for (const name of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T]) gl.texParameteri(gl.TEXTURE_2D, name, gl.CLAMP_TO_EDGE);
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA32F, 1, 1, 0, gl.RGBA, gl.FLOAT, new Float32Array(4));
  return made;
}

function linked(gl, fragment) {
  const program = gl.createProgram();
  for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, fragment]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  if (!gl.getProgramParameter(program, gl.LINK_STATUS) && !gl.isContextLost()) {
    const notes = gl.getAttachedShaders(program).map((shader) => gl.getShaderInfoLog(shader)).join("\n");
    throw new Error(`The shader does not compile: ${notes}`);
  }
  return program;
}
