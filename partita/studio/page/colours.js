/**
 * The colours of the page: the same numbers as partita/plots/colours.py (tests/test_studio_golden.py compares them).
 *
 *     LIGHT, DARK      {background, panel, rule, soft, muted, ink, accent, series, tints}
 *     MAPS             control points at equal distances, interpolated linearly in sRGB: value, signed, error, weight
 *     channels(hex)    [red, green, blue] from 0 to 1
 *     colourAt(map, t) [red, green, blue] from 0 to 255 at t in [0, 1]; for "signed", zero is at 0.5
 *     gradient(map)    a CSS linear-gradient from left to right
 */

export const LIGHT = {
  background: "#ffffff",
  panel: "#f5f7fa",
  rule: "#e4e7eb",
  soft: "#9aa5b1",
  muted: "#52606d",
  ink: "#1f2933",
  accent: "#c2410c",
  series: ["#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f"],
  tints: ["#d1c0f5", "#b7c3a8", "#f6f3da", "#f7d8a4", "#bbd7d0", "#e3e7fd"],
};

export const DARK = {
  background: "#12171d",
  panel: "#1b222a",
  rule: "#2b343e",
  soft: "#66717d",
  muted: "#a9b4c0",
  ink: "#e8edf2",
  accent: "#f0894d",
  series: ["#e8edf2", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f"],
  tints: ["#2f2014", "#255f4d", "#57350f", "#0f3937", "#28264c", "#4b4873"],
};

export const MAPS = {
  value: ["#1b1244", "#213070", "#13558e", "#0f7a9c", "#279ea7", "#5dbfa5", "#a2d986", "#dde984", "#fdf8a8"],
  signed: ["#08306b", "#2a63a8", "#5e9bd0", "#aacbe8", "#f7f7f5", "#f8cfa6", "#ee9a55", "#c25a17", "#6f2c02"],
  error: ["#fdfaf3", "#f6e9ce", "#f2ce9a", "#f1a353", "#e67b27", "#cf5613", "#a63e1e", "#72291e", "#361715"],
  weight: ["#f8fafd", "#d6dde4", "#b4bfca", "#91a0b0", "#718295", "#55677b", "#3c4f62", "#293a4b", "#1b2835"],
};

export function channels(hex) {
  return [1, 3, 5].map((k) => Number.parseInt(hex.slice(k, k + 2), 16) / 255);
}

const points = Object.fromEntries(Object.entries(MAPS).map(([name, colours]) => [name, colours.map(channels)]));

export function colourAt(map, t) {
  const stops = points[map];
  const place = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const first = Math.min(Math.floor(place), stops.length - 2);
  return [0, 1, 2].map((c) => Math.round(255 * (stops[first][c] + (place - first) * (stops[first + 1][c] - stops[first][c]))));
}

export function gradient(map) {
  return `linear-gradient(to right, ${MAPS[map].join(", ")})`;
}
