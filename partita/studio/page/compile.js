/**
 * The compile pane: function, domain, tolerance and method in; head, certificate and report out. The form is part of the
 * address. A reload or a shared link fills the form and does not compile by itself, since that may take its whole time
 * limit; the button does. The last result stays in view while the form is edited, while the next head is compiled, and
 * when the server is lost.
 *
 * Without a server the pane says how to start one and shows the gallery, heads that were compiled when the page was built.
 */
import { make, ResultView } from "./result.js";
import { dimensionOf, freshKeys } from "./state.js";

const EXAMPLES = [
  { f: "sin(3*x) + x*cos(2*y)", d: "[-1,1]^2", tol: 1e-6, method: "auto", says: "A smooth function of two variables: 64 keys for an error below 1e-6" },
  { f: "exp(-20*(x^2+y^2-0.4)^2)", d: "[-1,1]^2", tol: 0.2, method: "adaptive", says: "A ring: small cells where it bends" },
  { f: "max(abs(x), max(abs(y), 0.3))", d: "[-1,1]^2", tol: 0.01, method: "auto", says: "Affine pieces: one key each" },
  { f: "abs(sin(4*x))", d: "[-1,1]", tol: 0.01, method: "adaptive", says: "Kinks on a line" },
  { f: "1/(1 + 25*x^2)", d: "[-1,1]", tol: 1e-6, method: "auto", says: "Runge's function" },
  { f: "exp(-x^2-2*y^2)*sin(4*z)", d: "[-1,1]^3", tol: 1e-3, method: "auto", says: "Three variables, shown in slices" },
];
const FIELD_OF = { function: "f", text: "f", domain: "d", tolerance: "tol", method: "method", dtype: "dtype", norm: "norm", budget: "seconds" };
const METHODS_UNTIL_HELLO = [{ name: "auto", says: "Compares the methods that apply and takes the smallest head." }];

/** A tolerance as people type it: 0.05, 1e-6. */
const written = (tol) => (tol < 1e-3 ? tol.toExponential() : String(tol));

/**
 * @param {HTMLElement} element  an empty section
 * @param {Object} studio  what app.js hands to every pane
 */
export function mountCompile(element, studio) {
  element.classList.add("compile");
  if (studio.server) new CompilePane(element, studio);
  else mountGallery(element, studio);
}

class CompilePane {
  constructor(element, studio) {
    this.studio = studio;
    this.downloads = [];
    this.running = null;
    this.fields = {
      f: this.field("f", "Function", make("input", { type: "text", class: "mono", autocomplete: "off", spellcheck: "false", autocapitalize: "off" }), "for example sin(3*x) + x*cos(2*y)"),
      d: this.field("d", "Domain", make("input", { type: "text", class: "mono", autocomplete: "off", spellcheck: "false" }), "a box: [-1,1]^2 or [0,pi] x [0,2]"),
      tol: this.field("tol", "Tolerance", make("input", { type: "text", inputmode: "decimal", class: "mono", autocomplete: "off" }), "the largest error you allow"),
      method: this.field("method", "Method", make("select", {}), ""),
      dtype: this.field("dtype", "Number type", make("select", {}, ...["float64", "float32", "bfloat16", "float16"].map((name) => make("option", { value: name }, name))), ""),
      norm: this.field("norm", "Norm of the error", make("input", { type: "text", class: "mono", autocomplete: "off" }), "inf, or a number p ≥ 1"),
      seconds: this.field("seconds", "Time limit, seconds", make("input", { type: "text", inputmode: "numeric", class: "mono", value: "30" }), ""),
    };
    this.button = make("button", { type: "submit", "data-testid": "compile-run" }, "Compile");
    this.cancel = make("button", { type: "button", class: "quiet", hidden: true, "data-testid": "compile-cancel", onclick: () => this.running?.abort() }, "Cancel");
    this.bar = make("progress", { "aria-label": "Progress", max: 1 });
    this.what = make("span", { class: "what", "data-testid": "compile-progress" });
    this.progress = make("div", { class: "compile-progress", hidden: true }, this.bar, this.what);
    this.problem = make("p", { class: "warning", hidden: true, role: "alert", "data-testid": "compile-problem" });
    this.more = make("details", { class: "more", "data-testid": "compile-more" }, make("summary", {}, "More"), make("div", { class: "row" }, this.fields.dtype.row, this.fields.norm.row, this.fields.seconds.row));
    const form = make("form", { class: "compile-form", novalidate: true, "data-testid": "compile-form", onsubmit: (event) => { event.preventDefault(); this.run(); } },
      this.fields.f.row,
      make("div", { class: "row" }, this.fields.d.row, this.fields.tol.row, this.fields.method.row),
      this.more, make("div", { class: "buttons" }, this.button, this.cancel, this.progress), this.problem);
    const examples = make("div", { class: "examples" }, make("span", { class: "hint" }, "Examples: "), ...EXAMPLES.map((example, k) => make("button", {
      type: "button", class: "quiet chip", title: example.says, "data-testid": `example-${k}`,
      onclick: () => { this.fill(example); this.run(); },
    }, make("code", {}, example.f))));
    this.place = make("div", { class: "result", "data-testid": "result" });
    this.view = new ResultView(this.place, studio);
    element.append(make("h2", {}, "Compile a function into an attention head"), form, examples, this.place);
    this.methods(METHODS_UNTIL_HELLO);
    for (const field of Object.values(this.fields)) field.input.addEventListener("change", () => { this.mark(field, null); this.store(false); });
    studio.state.subscribe((now) => this.follow(now));
    studio.server.onConnection?.((there) => { if (there) this.greet(); });
    this.follow(studio.state.get());
    this.greet();
  }

  /** A labelled control with a place for its error. */
  field(name, label, input, hint) {
    const id = `compile-${name}`;
    const error = make("div", { class: "field-error", id: `${id}-error`, role: "alert", hidden: true, "data-testid": `${id}-error` });
    input.id = id;
    input.dataset.testid = id;
    if (hint) input.setAttribute("placeholder", hint);
    const row = make("div", { class: `field field-${name}` }, make("label", { for: id }, label), input, error);
    return { name, row, input, error };
  }

  async greet() {
    try {
      const { methods, downloads, limits } = await this.studio.server.hello();
      this.methods(methods);
      this.downloads = downloads;
      const most = limits?.seconds?.compile;
      if (most) this.fields.seconds.input.title = `at most ${most}`;
      this.follow(this.studio.state.get());
    } catch { /* the banner says that the server is lost; onConnection asks again */ }
  }

  methods(list) {
    const { input } = this.fields.method;
    const chosen = this.studio.state.get().method;
    const names = list.some((m) => m.name === chosen) ? list : [...list, { name: chosen, says: "" }];
    input.replaceChildren(...names.map(({ name, says }) => make("option", { value: name, title: says }, says ? `${name}: ${says}` : name)));
    input.value = chosen;
  }

  /** The address fills the form, except for a field that is being edited. */
  follow(now) {
    const shown = { f: now.f, d: now.d, tol: written(now.tol), method: now.method, dtype: now.dtype, norm: now.norm ?? "inf" };
    for (const [name, value] of Object.entries(shown)) {
      const { input } = this.fields[name];
      if (input.value !== value && document.activeElement !== input && !(name === "tol" && Number(input.value) === now.tol)) input.value = value;
    }
    if (now.dtype !== "float64" || (now.norm ?? "inf") !== "inf") this.more.open = true;
  }

  fill({ f, d, tol, method }) {
    this.fields.f.input.value = f;
    this.fields.d.input.value = d;
    this.fields.tol.input.value = written(tol);
    this.fields.method.input.value = method;
    for (const field of Object.values(this.fields)) this.mark(field, null);
  }

  /** The form into the address. A domain of another dimension also takes other keys in the playground. */
  store(push) {
    const { f, d, tol, method, dtype, norm } = this.fields;
    const now = this.studio.state.get();
    const patch = { f: f.input.value, d: d.input.value, method: method.input.value, dtype: dtype.input.value, norm: norm.input.value.trim() || "inf" };
    if (Number(tol.input.value) > 0) patch.tol = Number(tol.input.value);
    const before = dimensionOf(now.d), after = dimensionOf(patch.d);
    if (before !== after && (after === 1 || after === 2)) Object.assign(patch, { keys: freshKeys(after), follow: true, overlay: null });
    if (Object.entries(patch).some(([name, value]) => name !== "keys" && now[name] !== value)) this.studio.state.update(patch, { push });
  }

  /** Shows an error under a field, with a caret under the place in its text. */
  mark(field, error) {
    field.error.hidden = !error;
    field.input.toggleAttribute("aria-invalid", Boolean(error));
    if (error) field.input.setAttribute("aria-describedby", field.error.id);
    else { field.input.removeAttribute("aria-describedby"); field.error.replaceChildren(); return; }
    const parts = [];
    const text = field.input.value;
    if (error.start !== null && error.start !== undefined && text) {
      const [start, end] = [Math.min(error.start, text.length), Math.max(error.end ?? error.start, error.start + 1)];
      const from = Math.max(0, start - 40); // long texts: the part around the place
      const quoted = `${from ? "…" : ""}${text.slice(from, start + 60)}${start + 60 < text.length ? "…" : ""}`;
      const caret = " ".repeat(start - from + (from ? 1 : 0)) + "^".repeat(Math.min(end - start, 60));
      parts.push(make("pre", { "aria-hidden": "true", "data-testid": "caret" }, `${quoted}\n${caret}`));
      field.input.focus();
      field.input.setSelectionRange?.(start, Math.min(end, text.length));
    } else field.input.focus();
    parts.push(make("p", {}, error.short || error.message));
    field.error.replaceChildren(...parts);
  }

  fail(error) {
    if (error.type === "Cancelled") { this.studio.announce("Cancelled."); return; }
    const field = this.fields[FIELD_OF[error.where]];
    if (field) {
      if (this.more.contains(field.row)) this.more.open = true;
      this.mark(field, error);
    } else {
      this.problem.hidden = false;
      this.problem.textContent = error.message;
    }
    this.studio.announce(error.short || error.message);
  }

  /** What the form asks for, or null after an error has been shown. */
  read() {
    const { f, d, tol, method, dtype, norm, seconds } = this.fields;
    for (const field of Object.values(this.fields)) this.mark(field, null);
    this.problem.hidden = true;
    const wrong = (field, message) => { if (this.more.contains(field.row)) this.more.open = true; this.mark(field, { message, start: null }); return null; };
    if (!f.input.value.trim()) return wrong(f, "Type a function, such as sin(3*x).");
    if (!d.input.value.trim()) return wrong(d, "Type a domain, such as [-1,1].");
    if (!(Number(tol.input.value) > 0)) return wrong(tol, `The tolerance is ${tol.input.value || "empty"}; expected a number greater than 0, such as 0.01.`);
    const p = norm.input.value.trim() || "inf";
    if (p !== "inf" && !(Number(p) >= 1)) return wrong(norm, `The norm is ${p}; expected inf or a number of at least 1.`);
    const limit = Number(seconds.input.value);
    if (!(limit > 0)) return wrong(seconds, `The time limit is ${seconds.input.value || "empty"}; expected a number of seconds greater than 0.`);
    return { f: f.input.value, d: d.input.value, tol: Number(tol.input.value), method: method.input.value, dtype: dtype.input.value, norm: p, seconds: limit };
  }

  /** A head of one chosen method is shown in the report of all methods, if that is about the same function and tolerance. */
  keepReport(result, asked) {
    const about = JSON.stringify([asked.f, asked.d, asked.tol, asked.dtype, asked.norm]);
    const rows = result.report.rows;
    if (asked.method === "auto" || this.reported?.about !== about) { this.reported = { about, rows }; return; }
    const own = rows.find((row) => row.chosen) ?? rows[0];
    const known = this.reported.rows.some((row) => row.method === own.method);
    result.report.rows = [...this.reported.rows.map((row) => (row.method === own.method ? own : { ...row, chosen: false })), ...(known ? [] : [own])];
    this.reported.rows = result.report.rows;
    result.report.because = ""; // it is about the method that was asked for, not about the table
  }

  async run() {
    if (this.running) return;
    const asked = this.read();
    if (!asked) return;
    this.store(true);
    const { server, announce } = this.studio;
    this.running = new AbortController();
    this.button.disabled = true;
    this.cancel.hidden = this.progress.hidden = false;
    const start = performance.now();
    let said = "sent to the server";
    const tick = () => { this.what.textContent = `${said} · ${((performance.now() - start) / 1000).toFixed(1)} s`; };
    this.bar.removeAttribute("value");
    tick();
    const clock = setInterval(tick, 100);
    try {
      const body = { text: asked.f, domain: asked.d, tolerance: asked.tol, method: asked.method, dtype: asked.dtype, norm: asked.norm === "inf" ? "inf" : Number(asked.norm), budget: asked.seconds };
      const result = await server.job("compile", body, {
        signal: this.running.signal,
        onProgress: ({ state, place, progress }) => {
          said = state === "waiting" ? `waiting, place ${place ?? "?"} in the queue` : progress?.what || "working";
          if (progress?.of > 0) { this.bar.value = progress.done / progress.of; said += ` (${progress.done.toLocaleString("en")} of ${progress.of.toLocaleString("en")})`; } else this.bar.removeAttribute("value");
        },
      });
      this.keepReport(result, asked);
      this.view.show(result, asked, {
        server, downloads: this.downloads, onMethod: (method) => { this.fill({ ...asked, method }); this.run(); },
      });
      announce(`Done: ${result.keys} keys, ${result.kind === "estimated" ? "estimated error" : "error at most"} ${result.bound}.`);
    } catch (error) {
      this.fail(error);
    }
    clearInterval(clock);
    this.running = null;
    this.button.disabled = false;
    this.cancel.hidden = this.progress.hidden = true;
  }
}

/** The pane of the static page. */
async function mountGallery(element, studio) {
  const strip = make("div", { class: "gallery-strip", role: "group", "aria-label": "Compiled heads" });
  const says = make("p", { class: "gallery-says" });
  const place = make("div", { class: "result", "data-testid": "result" });
  const view = new ResultView(place, studio);
  element.append(
    make("h2", {}, "Gallery"),
    make("p", { class: "notice", "data-testid": "no-server" }, "This page has no server. To compile your own functions and prove bounds, install partita with its extra ", make("code", {}, "studio"), " and run ", make("code", {}, "partita studio"), "."),
    make("p", {}, "These heads were compiled and certified when the page was built. Your browser evaluates them and draws the pictures."),
    strip, says, place);
  const { heads } = await studio.gallery();
  const buttons = heads.map((head) => make("button", { type: "button", class: "quiet chip", "aria-pressed": "false", "data-testid": `gallery-${head.name}`, onclick: () => studio.state.update({ f: head.text, d: head.domain, tol: head.asked.tolerance, method: head.asked.method, ...keysFor(studio.state.get().d, head.domain) }, { push: true }) }, head.title));
  strip.append(...buttons);
  let open = null;
  const follow = (now) => {
    if (now.tab !== "compile") return;
    const same = (head) => head.text === now.f && head.domain === now.d;
    const head = heads.find((one) => same(one) && one.asked.method === now.method && one.asked.tolerance === now.tol) ?? heads.find(same) ?? heads[0];
    if (!head || head === open) return;
    open = head;
    buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(heads[k] === head)));
    says.textContent = head.says;
    view.show(head, { f: head.text, d: head.domain, tol: head.asked.tolerance, method: head.asked.method, dtype: "float64", norm: "inf", lipschitz: head.asked.lipschitz });
  };
  studio.state.subscribe(follow);
  follow(studio.state.get());
}

const keysFor = (before, after) => (dimensionOf(before) === dimensionOf(after) ? {} : { keys: freshKeys(dimensionOf(after)), follow: true });
