/**
 * The card of the lessons, which stands beside the playground in the tab "lessons". A lesson is a state of the playground,
 * so the address holds it: back, forward, reload and links work as everywhere. N and P (or the buttons) go to the next and
 * the previous lesson. Figures and charts are computed from the head that is on the page.
 */
import { LESSONS } from "./lesson_list.js";
import { shown as digits } from "./picture.js";
import { make } from "./result.js";
import { initial, toHash } from "./state.js";

/** @typedef {import("./state.js").State} State */

/** The state of a lesson, complete. @returns {State} */
export function lessonState(lesson) {
  return { ...initial(), ...lesson.state, tab: "lessons", lesson: lesson.name };
}

/** Numbers as everywhere on the page; words as they are. */
const shown = (value) => (typeof value === "number" ? digits(value) : String(value));

const SVG = "http://www.w3.org/2000/svg";
const draw = (tag, attributes, text = "") => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
};

/** A curve on two logarithmic axes, with a dot at `mark`. @returns {SVGElement} */
function chartOf({ points, mark, across, up }) {
  const [width, height, left, right, above, below] = [380, 190, 54, 12, 10, 36];
  const scale = (numbers, from, to) => {
    const [lo, hi] = [Math.log(Math.min(...numbers)), Math.log(Math.max(...numbers))];
    return (value) => from + ((Math.log(value) - lo) / (hi - lo || 1)) * (to - from);
  };
  const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
  const x = scale(xs, left, width - right), y = scale(ys, height - below, above);
  const near = points.reduce((a, b) => (Math.abs(Math.log(b[0] / mark)) < Math.abs(Math.log(a[0] / mark)) ? b : a));
  const says = `${up} against ${across}: ${shown(near[1])} at ${shown(near[0])}; least ${shown(Math.min(...ys))}.`;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, class: "lesson-chart", role: "img", "aria-label": says });
  for (let power = Math.ceil(Math.log10(Math.min(...xs))); 10 ** power <= Math.max(...xs); power += 1) {
    svg.append(draw("line", { x1: x(10 ** power), x2: x(10 ** power), y1: above, y2: height - below, class: "rule" }));
    svg.append(draw("text", { x: x(10 ** power), y: height - below + 14, "text-anchor": "middle" }, String(10 ** power)));
  }
  const ticks = [1, 2, 5].flatMap((lead) => [-8, -7, -6, -5, -4, -3, -2, -1, 0].map((power) => lead * 10 ** power));
  for (const tick of ticks.filter((t) => t >= Math.min(...ys) && t <= Math.max(...ys))) {
    svg.append(draw("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "rule" }));
    svg.append(draw("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, shown(tick)));
  }
  svg.append(draw("polyline", { points: points.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), class: "curve" }));
  svg.append(draw("circle", { cx: x(near[0]), cy: y(near[1]), r: 5, class: "mark" }));
  svg.append(draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, across));
  const title = draw("text", { x: 12, y: (above + height - below) / 2, "text-anchor": "middle" }, up);
  title.setAttribute("transform", `rotate(-90 12 ${(above + height - below) / 2})`);
  svg.append(title);
  return svg;
}

/**
 * @param {HTMLElement} element  an empty section
 * @param {Object} studio  what app.js hands to every pane
 */
export function mountLessons(element, studio) {
  const { state, announce } = studio;
  let current = null;
  /** What the playground last said of its head; `now` is the state that it is about. */
  let told = { now: null, f: null };

  const position = () => LESSONS.findIndex((lesson) => lesson.name === state.get().lesson);
  const open = (index, how) => {
    const lesson = LESSONS[Math.min(Math.max(index, 0), LESSONS.length - 1)];
    state.update(lessonState(lesson), how);
    announce(`Lesson ${LESSONS.indexOf(lesson) + 1} of ${LESSONS.length}: ${lesson.title}`);
  };

  const previous = make("button", { type: "button", class: "quiet", "data-testid": "lesson-previous", "aria-label": "Previous lesson", title: "Previous lesson (P)", onclick: () => open(position() - 1, { push: true }) }, "←");
  const next = make("button", { type: "button", "data-testid": "lesson-next", title: "Next lesson (N)", onclick: () => open(position() + 1, { push: true }) }, "Next →");
  const choose = make("select", { id: "lesson-choose", "data-testid": "lesson-choose", onchange: () => open(choose.selectedIndex, { push: true }) });
  for (const part of new Set(LESSONS.map((lesson) => lesson.part))) {
    const group = make("optgroup", { label: part });
    LESSONS.forEach((lesson, k) => { if (lesson.part === part) group.append(make("option", { value: lesson.name }, `${k + 1}. ${lesson.title}`)); });
    choose.append(group);
  }
  const again = make("button", { type: "button", class: "quiet", "data-testid": "lesson-again", onclick: () => open(position(), { push: true }) }, "Start over");
  const part = make("p", { class: "lesson-part" });
  const title = make("h2", { tabindex: "-1", "data-testid": "lesson-title" });
  const text = make("div", { class: "lesson-text" });
  const formula = make("div", { class: "lesson-formula", "data-testid": "lesson-formula" });
  const attempt = make("p", { class: "lesson-attempt" });
  const knobs = make("div", { class: "lesson-knobs" });
  const figures = make("dl", { class: "lesson-figures", "data-testid": "lesson-figures" });
  const chart = make("div", { class: "lesson-chart-place" });
  element.classList.add("lesson", "card");
  element.append(
    make("div", { class: "lesson-choice" }, make("label", { for: "lesson-choose", class: "hidden" }, "Lesson"), previous, choose, next),
    part, title, text, formula, attempt, knobs, chart, figures,
    make("div", { class: "lesson-steps" }, again, make("span", { class: "hint" }, "Keys: N next lesson, P previous lesson")),
  );

  function knobOf(knob) {
    const id = `knob-${knob.id}`;
    const output = make("output", { for: id });
    const slider = make("input", { type: "range", id, min: 0, max: knob.values.length - 1, step: 1, "data-testid": id });
    const set = (how) => {
      const value = knob.values[Number(slider.value)];
      state.update(knob.apply(value, state.get()), how);
    };
    slider.addEventListener("input", () => set({ live: true }));
    slider.addEventListener("change", () => set({ push: true }));
    const follow = () => {
      const value = knob.read(state.get());
      let index = knob.values.indexOf(value);
      if (index < 0 && typeof value === "number") {
        index = knob.values.reduce((best, v, k) => (typeof v === "number" && Math.abs(v - value) < Math.abs(knob.values[best] - value) ? k : best), 0);
      }
      if (index >= 0 && Number(slider.value) !== index) slider.value = String(index);
      output.textContent = shown(value);
      slider.setAttribute("aria-valuetext", shown(value));
    };
    return { row: make("div", { class: "lesson-knob" }, make("label", { for: id }, knob.label), output, slider), follow };
  }

  /** A knob whose values are words: one button for each. */
  function choiceOf(knob) {
    const group = make("div", { class: "choice", role: "radiogroup", "aria-label": knob.label }, make("span", { class: "choice-name", "aria-hidden": "true" }, knob.label));
    const inputs = knob.values.map((value) => {
      const input = make("input", { type: "radio", name: `knob-${knob.id}`, value, "data-testid": `knob-${knob.id}-${value}`, onchange: () => state.update(knob.apply(value, state.get()), { push: true }) });
      group.append(make("label", {}, input, make("span", {}, value)));
      return input;
    });
    return { row: group, follow: () => inputs.forEach((input) => { input.checked = input.value === knob.read(state.get()); }) };
  }

  let rows = [];
  function showLesson(lesson) {
    const first = current === null;
    current = lesson;
    const index = LESSONS.indexOf(lesson);
    choose.value = lesson.name;
    part.textContent = `${lesson.part} · ${index + 1} of ${LESSONS.length}`;
    title.textContent = lesson.title;
    text.replaceChildren(...lesson.text.map((sentence) => make("p", {}, sentence)));
    formula.innerHTML = lesson.formula; // the page's own text, from lesson_list.js
    attempt.replaceChildren(make("strong", {}, "Try it. "), lesson.attempt);
    previous.disabled = index === 0;
    next.disabled = index === LESSONS.length - 1;
    rows = (lesson.knobs ?? []).map((knob) => (knob.values.every((value) => typeof value === "string") ? choiceOf(knob) : knobOf(knob)));
    knobs.replaceChildren(...rows.map((knob) => knob.row));
    if (!first && !element.contains(document.activeElement)) title.focus({ preventScroll: true }); // a screen reader goes on from here
  }

  let asked = false;
  /** Figures at most once per frame. */
  function refresh() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      if (!current || state.get().tab !== "lessons") return;
      rows.forEach((knob) => knob.follow());
      const ready = told.f && told.now?.lesson === current.name && told.now.f === state.get().f;
      const view = { ...told, state: told.now };
      const lines = ready ? current.figures?.(view) ?? [] : [];
      figures.replaceChildren(...lines.flatMap(({ id, label, value, missing }) => [
        make("dt", {}, label),
        make("dd", { "data-testid": `figure-${id}`, "data-value": value === null ? "" : value }, value === null ? missing ?? "unknown" : shown(value)),
      ]));
      const curve = ready ? current.chart?.(view) : null;
      chart.replaceChildren(...(curve ? [chartOf(curve)] : []));
    });
  }

  function follow(now) {
    if (now.tab !== "lessons") return;
    const lesson = LESSONS.find((one) => one.name === now.lesson);
    if (!lesson) { state.update(lessonState(LESSONS[0])); return; }
    // an address with nothing but the lesson's name means its first state
    if (toHash(now) === toHash({ ...initial(), tab: "lessons", lesson: lesson.name }) && toHash(now) !== toHash(lessonState(lesson))) {
      state.update(lessonState(lesson));
      return;
    }
    if (lesson !== current) showLesson(lesson);
    refresh();
  }

  state.subscribe(follow);
  studio.onFigures((figuresNow) => { told = figuresNow; refresh(); });
  document.addEventListener("keydown", (event) => {
    if (state.get().tab !== "lessons" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input:not([type=range]), textarea, select, [contenteditable]")) return;
    const step = { n: 1, p: -1 }[event.key.toLowerCase()];
    const to = position() + step;
    if (!step || to < 0 || to >= LESSONS.length) return;
    event.preventDefault();
    open(to, { push: true });
  });
  follow(state.get());
}
