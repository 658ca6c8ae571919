/**
 * Boot: reads the address, mounts the parts, switches tabs and themes, shows the banner of a lost server.
 *
 * Parts are `mountX(element, studio)` and get one plain object:
 *     studio.state       the module state.js
 *     studio.server      the module server.js, or null on the static page
 *     studio.announce(text)               one polite live region for the whole page
 *     studio.functions(text, domain)      {label, graph, box, dimension, outputs}, from the server or from the stored ones
 *     studio.gallery()                    the stored heads and functions of the static page, or null
 *     studio.Picture, studio.Graph1d      the components
 *     studio.playground  {head(), figures(), element} once it is mounted; show a head there with state.update
 *     studio.onTab(fn)   fn(name) when a tab is shown
 *
 * For tests and the curious, `window.studio` = {state(), head(), evaluate(point), figures(), frame, ready, painter, picture}.
 */

import { frame } from "./frame.js";
import { Graph1d } from "./graphs_1d.js";
import { FUNCTIONS } from "./lesson_data.js";
import { Picture } from "./picture.js";
import { mountPlayground } from "./playground.js";
import * as server from "./server.js";
import * as state from "./state.js";

const TABS = ["playground", "compile", "lessons"];
const PARTS = { compile: ["./compile.js", "mountCompile"], lessons: ["./lessons.js", "mountLessons"] };
const find = (id) => document.getElementById(id);

function announce(text) {
  find("live").textContent = "";
  setTimeout(() => { find("live").textContent = text; }, 30);
}

function banner(text) {
  find("banner").textContent = text ?? "";
  find("banner").hidden = !text;
}

let galleryPromise = null;
/** gallery.json and the functions of the lessons: all that the static page knows. */
function gallery() {
  galleryPromise ??= (async () => {
    const stored = { functions: [], heads: [] };
    if (!server.available) {
      try {
        const reply = await fetch("gallery.json");
        if (reply.ok) Object.assign(stored, await reply.json());
      } catch { /* a page without a gallery */ }
    }
    stored.functions = [...stored.functions, ...stored.heads, ...FUNCTIONS];
    return stored;
  })();
  return galleryPromise;
}

const plain = (text) => text.replace(/\s+/g, "");

async function functions(text, domain, options = {}) {
  const known = FUNCTIONS.find((item) => item.text === text && item.domain === domain); // no need to ask for these
  if (known) return known;
  if (server.available) return server.call("/api/function", { text, domain }, options);
  const stored = await gallery();
  const found = stored.functions.find((item) => plain(item.text) === plain(text) && plain(item.domain) === plain(domain));
  if (found) return found;
  throw new server.StudioError({ type: "NoServer", where: "function", message: "This page has no server to read new functions. Choose an example, or run `partita studio`." });
}

const tabListeners = new Set();
const studio = {
  state, server: server.available ? server : null, announce, functions, gallery, Picture, Graph1d, playground: null,
  onTab: (fn) => { tabListeners.add(fn); return () => tabListeners.delete(fn); },
};

const mounted = new Set();
async function mount(name) {
  if (mounted.has(name) || !PARTS[name]) return;
  mounted.add(name);
  const element = name === "lessons" ? find("lesson-card") : find(name);
  try {
    const part = await import(PARTS[name][0]);
    await part[PARTS[name][1]](element, studio);
  } catch (error) {
    console.error(error);
    mounted.delete(name);
    element.textContent = `This part could not be loaded: ${error.message}`;
  }
}

function showTab(name) {
  for (const tab of TABS) {
    const chosen = tab === name;
    find(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    find(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
    find(tab).hidden = !(chosen || (tab === "playground" && name === "lessons"));
  }
  document.body.dataset.tab = name;
  document.title = name === "playground" ? "partita studio" : `${name[0].toUpperCase()}${name.slice(1)} · partita studio`;
  mount(name);
  for (const tell of tabListeners) tell(name);
}

function tabs() {
  for (const tab of TABS) find(`tab-${tab}`).addEventListener("click", () => state.update({ tab }, { push: true }));
  document.querySelector('[role="tablist"]').addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const to = { Home: TABS[0], End: TABS[2] }[event.key] ?? (step ? TABS[(TABS.indexOf(state.get().tab) + step + 3) % 3] : null);
    if (!to) return;
    event.preventDefault();
    state.update({ tab: to }, { push: true });
    find(`tab-${to}`).focus();
  });
  state.subscribe((now, before) => { if (now.tab !== before.tab) showTab(now.tab); });
}

function themes() {
  const select = find("theme");
  const apply = () => {
    if (select.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = select.value;
    dispatchEvent(new Event("studio-theme"));
  };
  try { select.value = localStorage.getItem("partita-theme") ?? "auto"; } catch { /* no storage */ }
  if (!select.value) select.value = "auto";
  select.addEventListener("change", () => {
    try { localStorage.setItem("partita-theme", select.value); } catch { /* no storage */ }
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

function boot() {
  const notes = state.start((late) => announce(late.join(" ")));
  themes();
  tabs();
  const playground = (studio.playground = mountPlayground(find("playground"), studio));
  window.studio = {
    state: () => state.get(), head: playground.head, evaluate: playground.evaluate, figures: playground.figures, frame,
    ready: playground.ready, get painter() { return playground.painter(); }, picture: playground.picture, parts: studio,
  };
  showTab(state.get().tab);
  if (notes.length) announce(notes.join(" "));
  server.onConnection((good) => {
    banner(good ? null : "The server does not answer. Pictures still work; compiling and proving do not. If you stopped the studio, run `partita studio` again and open the address that it prints.");
    if (good) announce("The server answers again.");
  });
}

boot();
