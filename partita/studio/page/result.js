/**
 * A compiled head, shown: summary, pictures, the report of all methods, the certificate, the checker, downloads, Python.
 * The compile pane shows what the server compiled, the gallery of the static page what was compiled when it was built.
 *
 *     const view = new ResultView(element, studio)
 *     view.show(result, asked, {server, downloads, onMethod})
 *
 * `result` is the result of a job "compile"; `asked` is the form: {f, d, tol, method, dtype, norm}.
 */
import { compileNodes } from "./graph.js";
import { cellsOf, headOf } from "./head.js";
import { pythonBlock, pythonForCompile } from "./python_text.js";
import { shown } from "./picture.js";
import { dimensionOf, rounded } from "./state.js";

const SLICE = 96; // samples per axis of a picture that the server computes
const MOST_OPENED = 400; // keys that the playground is asked to take
const MOST_COMPILED = 1_000_000; // keys of a forecast that a click still tries
const KINDS = {
  proved: "proved on the whole domain, rounding included",
  proved_given: "proved, if what was declared about the function is true",
  estimated: "an estimate from samples; nothing is proved",
};
const FILES = { head: "Head and certificate (zip)", onnx: "ONNX", c: "C", svg: "Picture (SVG)", png: "Picture (PNG)" };

/** @returns {HTMLElement} */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const count = (number) => (number === null || number === undefined ? "–" : number.toLocaleString("en"));

export class ResultView {
  constructor(element, studio) {
    Object.assign(this, { element, studio, pictures: [] });
  }

  clear() {
    for (const picture of this.pictures) picture.remove();
    this.pictures = [];
    this.element.replaceChildren();
  }

  show(result, asked, { server = null, downloads = [], onMethod = null } = {}) {
    this.clear();
    Object.assign(this, { result, asked, server, output: 0 });
    this.element.append(
      this.summary(), this.picturePlace(), this.actions(downloads), this.certificate(),
      ...(result.report?.rows?.length ? [this.report(onMethod)] : []),
    );
    this.drawPictures();
  }

  summary() {
    const { result, asked } = this;
    const bound = result.bound ?? null;
    const figure = (testid, value, label) => make("div", { class: "figure" }, make("strong", { "data-testid": testid, "data-value": value ?? "" }, typeof value === "number" ? value : String(value)), make("span", {}, label));
    const keys = figure("result-keys", count(result.keys), result.keys_per_axis?.length > 1 ? `keys (${result.keys_per_axis.join(" × ")})` : "keys");
    const numbers = figure("result-numbers", count(result.numbers), "numbers stored");
    const error = figure("result-bound", bound === null ? "none" : `${result.kind === "estimated" ? "≈" : "≤"} ${shown(bound)}`, `error ${result.kind === "estimated" ? "estimate" : "bound"}${asked.norm === "inf" ? "" : ` in the L${asked.norm} norm`}`);
    error.querySelector("strong").dataset.value = bound ?? "";
    const seen = figure("result-seen", result.seen === null || result.seen === undefined ? "–" : shown(result.seen), asked.norm === "inf" ? "largest error seen" : "largest error seen at a point");
    const missed = result.tolerance_met === false ? make("p", { class: "warning" }, `The tolerance ${asked.tol} was not reached; this is the best head found in the time given.`) : null;
    return make("section", { class: "result-summary", "aria-label": "Summary" },
      make("h3", { "data-testid": "result-title" }, make("code", {}, asked.f), " on ", make("code", {}, asked.d)),
      make("div", { class: "figures" }, keys, numbers, error, seen),
      make("p", { class: "kind" }, make("span", { class: `badge ${result.kind}`, "data-testid": "result-kind" }, result.kind.replace("_", " ")), ` ${KINDS[result.kind] ?? ""}. Method: `, make("b", { "data-testid": "result-method" }, result.method ?? asked.method), "."),
      missed);
  }

  picturePlace() {
    this.place = make("section", { class: "result-pictures", "aria-label": "Pictures of the head", "data-testid": "result-pictures" });
    return this.place;
  }

  /** Pictures of the head in the browser where its keys came along, of the server's samples otherwise. */
  drawPictures() {
    for (const picture of this.pictures) picture.remove();
    this.pictures = [];
    const { result, output } = this;
    const wire = result.head ? { ...result.head, ...(result.head.outputs?.[output] ?? {}) } : null;
    this.place.replaceChildren();
    if ((result.outputs ?? 1) > 1) this.place.append(this.outputChoice());
    if (result.dimension > 2 || (!wire && result.dimension === 2)) { this.drawSlice(); return; }
    if (!wire) { this.place.append(make("p", {}, "The page does not draw the keys of this head; its picture can be downloaded.")); return; }
    const frame = make("div", {});
    this.place.append(frame);
    const { Picture, Graph1d } = this.studio;
    if (result.dimension === 1) {
      const graph = new Graph1d(frame);
      this.pictures.push(graph);
      graph.show({ head: headOf(wire), f: result.graph ? compileNodes(result.graph, output) : null, box: result.box });
    } else {
      const picture = new Picture(frame, { panes: ["head", "cells", "function", "error"] });
      this.pictures.push(picture);
      picture.show({ head: wire, graph: result.graph, output, box: result.box, tint: "value" });
    }
    const dead = cellsOf(headOf(wire), result.box)?.dead.reduce((a, b) => a + b, 0) ?? 0;
    if (dead) this.place.append(make("p", { class: "hint", "data-testid": "result-ghosts" }, `${count(dead)} of the ${count(wire.centers.length)} keys win no query of the box. Those beyond its edge are ghosts: their weights reach into it.`));
  }

  outputChoice() {
    const select = make("select", { id: "result-output", "data-testid": "result-output", onchange: () => { this.output = select.selectedIndex; this.drawPictures(); } });
    for (let k = 0; k < this.result.outputs; k += 1) select.append(make("option", { value: k }, `output ${k}`));
    select.selectedIndex = this.output;
    return make("p", {}, make("label", { for: "result-output" }, "Show "), select);
  }

  /** A plane through the domain, sampled by the server. */
  drawSlice() {
    const { result, server } = this;
    const { lo, hi } = result.box;
    if (!server || !result.head_id) { this.place.append(make("p", {}, "This head has no picture here.")); return; }
    const slice = (this.slice ??= { axes: [0, 1], at: lo.map((a, i) => a + 0.7 * (hi[i] - a)) }); // the middle is often a plane of symmetry
    const frame = make("div", {}), status = make("p", { class: "hint", role: "status" });
    const choose = (which) => {
      const select = make("select", { "aria-label": which ? "Vertical axis" : "Horizontal axis", onchange: () => {
        const other = slice.axes[1 - which];
        if (select.selectedIndex === other) slice.axes[1 - which] = slice.axes[which];
        slice.axes[which] = select.selectedIndex;
        this.drawPictures();
      } });
      lo.forEach((_, i) => select.append(make("option", { value: i }, `x${i}`)));
      select.selectedIndex = slice.axes[which];
      return select;
    };
    const others = lo.map((_, i) => i).filter((i) => !slice.axes.includes(i));
    const sliders = others.slice(0, 12).map((i) => {
      const said = make("output", {}, shown(slice.at[i]));
      const slider = make("input", { type: "range", min: lo[i], max: hi[i], step: (hi[i] - lo[i]) / 100, value: slice.at[i], "aria-label": `x${i}`, "data-testid": `slice-${i}` });
      slider.addEventListener("input", () => { said.textContent = shown(Number(slider.value)); });
      slider.addEventListener("change", () => { slice.at[i] = Number(slider.value); load(); });
      return make("label", { class: "slice" }, `x${i} = `, slider, said);
    });
    this.place.append(make("p", { class: "slice-axes" }, "A slice through the domain: across ", choose(0), " up ", choose(1)), ...sliders, frame, status);
    const picture = new this.studio.Picture(frame, { panes: ["head", "function", "error"] });
    this.pictures.push(picture);
    const load = async () => {
      status.textContent = "The server is computing the samples…";
      const [i, j] = slice.axes;
      const ask = { text: this.asked.f, domain: this.asked.d, grid: [SLICE, SLICE], axes: [i, j], at: slice.at, output: this.output };
      try {
        const [head, f] = await Promise.all([server.call("/api/sample", { ...ask, head: result.head_id }), server.call("/api/sample", { ...ask, head: null })]);
        const numbers = (reply) => Float64Array.from(reply.values, (v) => v ?? NaN);
        picture.show({
          head: null, graph: null, box: { lo: [lo[i], lo[j]], hi: [hi[i], hi[j]] },
          sampled: { n: SLICE, head: numbers(head), function: numbers(f) },
        });
        status.textContent = `${SLICE} × ${SLICE} samples by the server${others.length ? `; the other coordinates stay at ${others.slice(0, 6).map((k) => `x${k} = ${shown(slice.at[k])}`).join(", ")}` : ""}.`;
      } catch (error) {
        status.textContent = error.message;
      }
    };
    load();
  }

  actions(downloads) {
    const { result, asked, server, studio } = this;
    const bar = make("div", { class: "result-actions" });
    const below = make("div", { class: "result-below" });
    if (server && result.head_id) {
      const verdict = make("div", { class: "verdict", "data-testid": "check-verdict", role: "status" });
      const check = make("button", { type: "button", class: "quiet", "data-testid": "check", onclick: async () => {
        check.disabled = true;
        verdict.replaceChildren(make("p", {}, "partita-check, a separate program, is proving the claim again…"));
        try {
          const { verdict: said, text } = await server.job("check", { head: result.head_id });
          verdict.replaceChildren(make("p", {}, make("span", { class: `badge ${said}`, "data-testid": "verdict-word" }, said), " is the verdict of partita-check, which shares no code with partita."), make("pre", { tabindex: "0", "data-testid": "verdict-text" }, text));
          studio.announce(`The independent checker says: ${said}.`);
        } catch (error) {
          verdict.replaceChildren(make("p", { class: "warning" }, error.message));
        }
        check.disabled = false;
      } }, "Check it independently");
      bar.append(check);
      for (const what of downloads) {
        const button = make("button", { type: "button", class: "quiet", "data-testid": `download-${what}`, onclick: () => this.download(what, button) }, FILES[what] ?? what);
        bar.append(button);
      }
      below.append(verdict);
    }
    const python = make("div", { hidden: true });
    const toggle = make("button", { type: "button", "aria-expanded": "false", class: "quiet", "data-testid": "show-python", onclick: () => {
      python.hidden = !python.hidden;
      toggle.setAttribute("aria-expanded", String(!python.hidden));
      if (!python.childElementCount) python.append(pythonBlock(pythonForCompile(asked), studio.announce));
    } }, "Show the Python");
    bar.append(toggle);
    const opened = this.playgroundState();
    if (opened) bar.append(make("button", { type: "button", class: "quiet", "data-testid": "open-in-playground", title: "Numbers are rounded to six digits", onclick: () => { studio.state.update(opened, { push: true }); scrollTo(0, 0); } }, "Open in the playground"));
    below.append(python);
    return make("section", { "aria-label": "Actions" }, bar, below);
  }

  async download(what, button) {
    const label = button.textContent;
    button.disabled = true;
    button.textContent = "Writing…";
    try {
      const { download } = await this.server.job("export", { head: this.result.head_id, what });
      const { bytes, name } = await this.server.fetchBytes(download);
      const address = URL.createObjectURL(bytes);
      make("a", { href: address, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60_000);
      this.studio.announce(`Downloaded ${name}.`);
    } catch (error) {
      this.studio.announce(error.message);
      button.after(make("p", { class: "warning" }, error.message));
    }
    button.disabled = false;
    button.textContent = label;
  }

  /** The head as a state of the playground, where it has one rate and few enough keys. */
  playgroundState() {
    const { head, dimension } = this.result;
    if (!head || dimension > 2 || head.centers.length > MOST_OPENED || head.rates.some((rate) => Math.abs(rate - head.rates[0]) > 1e-9 * rate)) return null;
    if (dimensionOf(this.asked.d) !== dimension) return null;
    const R = head.rates[0];
    const powers = head.biases?.map((b) => (2 * b) / R);
    // a common power changes nothing: take it away before six digits are kept
    const common = powers ? powers.reduce((a, b) => Math.max(a, b)) : 0;
    const keys = head.centers.map((x, j) => ({
      x: x.map(rounded), p: powers ? rounded(powers[j] - common) : 0, v: rounded(head.values[j]), g: (head.slopes?.[j] ?? x.map(() => 0)).map(rounded),
    }));
    return {
      tab: "playground", f: this.asked.f, d: this.asked.d, R: rounded(R), cells: powers ? "power" : "voronoi", values: head.slopes ? "affine" : "constant",
      follow: false, keys, overlay: null, output: 0, lesson: "",
    };
  }

  certificate() {
    const { result } = this;
    const terms = (result.terms ?? []).filter((term) => term.value !== null);
    const largest = Math.max(...terms.map((term) => term.value), 1e-300);
    const least = Math.min(...terms.map((term) => term.value).filter((v) => v > 0), largest);
    const floor = Math.log10(Math.max(least, largest * 1e-18)) - 0.5, span = Math.log10(largest) - floor || 1;
    const share = (value) => (value > 0 ? Math.max(0.02, Math.min(1, (Math.log10(value) - floor) / span)) : 0);
    const table = make("table", { class: "terms", "data-testid": "terms" },
      make("caption", {}, "Terms of the bound (bars on a logarithmic scale)"),
      make("thead", {}, make("tr", {}, ...["term", "size", "", "formula"].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...terms.map((term) => {
        const bar = make("span", { class: "term-bar" });
        bar.style.width = `${100 * share(term.value)}%`;
        return make("tr", {}, make("th", { scope: "row" }, term.name), make("td", { class: "number" }, shown(term.value)), make("td", { class: "bar-cell", "aria-hidden": "true" }, bar), make("td", {}, make("span", { class: "formula" }, term.formula), term.theorem ? make("span", { class: "theorem" }, ` [${term.theorem}]`) : ""));
      })));
    const assumptions = (result.assumptions ?? []).map((a) => make("li", {}, a.statement ?? String(a)));
    return make("section", { class: "certificate", "aria-label": "Certificate" },
      make("h3", {}, "Certificate"),
      terms.length ? make("div", { class: "wide" }, table) : null,
      assumptions.length ? make("p", {}, "It assumes:") : null,
      assumptions.length ? make("ul", { "data-testid": "assumptions" }, ...assumptions) : null,
      result.explain ? make("details", {}, make("summary", {}, "The certificate in full"), make("pre", { tabindex: "0" }, result.explain)) : null);
  }

  report(onMethod) {
    const { rows, because } = this.result.report;
    const body = rows.map((row) => {
      const name = onMethod && (row.keys ?? 0) <= MOST_COMPILED
        ? make("button", { type: "button", class: "link", "data-testid": `method-${row.method}`, title: `Compile with ${row.method} and show that head`, onclick: () => onMethod(row.method) }, row.method)
        : row.method;
      return make("tr", { class: row.chosen ? "chosen" : null, "aria-current": row.chosen ? "true" : null },
        make("th", { scope: "row" }, name, row.chosen ? make("span", { class: "badge chosen" }, "shown") : ""),
        make("td", { class: "number" }, count(row.keys)), make("td", { class: "number" }, count(row.numbers)),
        make("td", { class: "number" }, row.bound === null ? "–" : shown(row.bound)), make("td", {}, row.reason ?? ""));
    });
    return make("section", { "aria-label": "Report" }, make("h3", {}, "Methods that were considered"),
      onMethod ? make("p", { class: "hint" }, rows.length > 1 ? "Choose a method to compile with it and to see its head." : make("button", { type: "button", class: "link", "data-testid": "method-all", onclick: () => onMethod("auto") }, "Compare it with all other methods")) : null,
      make("div", { class: "wide" }, make("table", { class: "report", "data-testid": "report" },
        make("thead", {}, make("tr", {}, ...["method", "keys", "numbers", "bound", "remark"].map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...body))),
      because ? make("p", { "data-testid": "because" }, because) : null);
  }
}
