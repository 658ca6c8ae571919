/**
 * "Show the Python": the lines that build what the page shows.
 *
 *     pythonForHead(state, wire, box)   pa.head with the keys of the playground
 *     pythonForCompile(asked)           pa.compile with the entries of the form
 *     pythonBlock(text)                 an element that shows such lines, with a button that copies them
 *
 * tests/test_studio_compile.py and tests/test_studio_lessons.py run these lines and compare the bound with the page's.
 */

/** A text as a Python literal: JSON's escapes are Python's too. */
const literal = (text) => JSON.stringify(text);

/** A float as Python writes it. */
function float(x) {
  const text = String(x);
  return /[.e]/.test(text) ? text.replace(/e\+?(-?)/, "e$1") : `${text}.0`;
}

const list = (numbers) => `[${numbers.map(float).join(", ")}]`;

/** Rows of numbers, one per line, or several short ones per line. */
function rows(name, entries) {
  const lines = [];
  let line = "";
  for (const entry of entries) {
    if (line && line.length + entry.length > 96) { lines.push(line); line = ""; }
    line += `${line ? " " : ""}${entry},`;
  }
  if (line) lines.push(line);
  return lines.length === 1 && lines[0].length < 80 ? [`    ${name}=[${lines[0].slice(0, -1)}],`] : [`    ${name}=[`, ...lines.map((text) => `        ${text}`), "    ],"];
}

const inside = (box) => (center) => center.every((c, i) => c >= box.lo[i] && c <= box.hi[i]);

/** The rate that stands for the limit "hard" in Python, where R is a finite number. */
export const HARD_RATE = 1e6;

/**
 * @param {import("./state.js").State} state
 * @param {{rates: number[], centers: number[][], biases: number[]|null, values: number[], slopes: number[][]|null}} wire
 * @param {{lo: number[], hi: number[]}} box
 */
export function pythonForHead(state, wire, box) {
  const rate = state.R === "hard" ? HARD_RATE : state.R;
  const lines = ["import partita as pa", "", "c = pa.head(", `    ${literal(state.f)},`, `    ${literal(state.d)},`];
  lines.push(...rows("centers", wire.centers.map(list)));
  const powers = state.cells === "voronoi" ? null : state.keys.map((key) => key.p);
  if (powers?.some((p) => p !== 0)) lines.push(...rows("powers", powers.map(float)));
  if (state.follow && wire.centers.every(inside(box))) {
    lines.push(`    values=${literal(state.values === "affine" ? "affine" : "centers")},`);
  } else {
    lines.push(...rows("values", wire.values.map(float)));
    if (wire.slopes) lines.push(...rows("slopes", wire.slopes.map(list)));
  }
  const note = state.R === "hard" ? "  # stands for the hard limit" : "";
  lines.push(`    inverse_temperature=${float(rate)},${note}`, ")", "print(c.error_bound)  # proved, on the whole domain, rounding included");
  return `${lines.join("\n")}\n`;
}

/** @param {{f: string, d: string, tol: number, method: string, dtype: string, norm: string, lipschitz?: number|null}} asked */
export function pythonForCompile(asked) {
  const lines = ["import partita as pa"];
  if (asked.dtype !== "float64") lines.push("import torch");
  lines.push("");
  const options = [`tolerance=${Number.isInteger(asked.tol) ? float(asked.tol) : String(asked.tol).replace("e+", "e")}`];
  if (asked.method !== "auto") options.push(`method=${literal(asked.method)}`);
  if (asked.dtype !== "float64") options.push(`dtype=torch.${asked.dtype}`);
  if (asked.norm !== "inf") options.push(`norm=${asked.norm}`);
  if (asked.lipschitz) {
    lines.splice(1, 0, "import numpy as np");
    lines.push("def black_box(z):", "    return np.abs(np.sin(4 * z[:, 0]))", "", "");
    options.push(`lipschitz=${float(asked.lipschitz)}`);
  }
  const call = `c = pa.compile(${asked.lipschitz ? "black_box" : literal(asked.f)}, ${literal(asked.d)}, ${options.join(", ")})`;
  lines.push(call, "print(c.error_bound)", "print(c.certificate.explain())", 'c.save("head/")  # then, in a shell: partita-check head/');
  return `${lines.join("\n")}\n`;
}

/** @param {string} text @param {(said: string) => void} announce */
export function pythonBlock(text, announce = () => {}) {
  const place = document.createElement("div");
  place.className = "python";
  const code = document.createElement("pre");
  code.tabIndex = 0;
  code.dataset.testid = "python-text";
  code.setAttribute("aria-label", "Python code");
  code.textContent = text;
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "quiet";
  copy.dataset.testid = "python-copy";
  copy.textContent = "Copy";
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
      announce("The Python code is in the clipboard.");
    } catch {
      getSelection()?.selectAllChildren(code); // no clipboard: the text is selected, to be copied by hand
      copy.textContent = "Selected: press Ctrl+C";
      announce("The Python code is selected. Copy it with the keyboard.");
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 2500);
  });
  place.append(copy, code);
  return place;
}
