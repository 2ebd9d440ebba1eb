/** The page: its views, their addresses, light and dark. */

import { AnswersView } from "./answers.js";
import { EventsView, ALARMS } from "./events.js";
import { LearningView } from "./learning.js";
import { StalenessView } from "./staleness.js";
import { LiveStore, loadFile, Store } from "./store.js";
import { SwarmView } from "./swarm.js";
import { TimelineView } from "./timeline.js";
import { el, moment, oneLine } from "./text.js";

const REDRAW_MS = 150;
/** A long run, which is slow to draw, is drawn again after so many times the time that it took. */
const DRAW_SHARE = 4;
let drawMs = 0;
const block = document.getElementById("run-data");
const store = block ? new Store() : new LiveStore();

/** @type {Record<string, [string, string]>} questions by the name of their view, with short labels for narrow screens */
const QUESTIONS = {
  learning: ["Is it learning?", "learning"],
  answers: ["What did it write?", "answers"],
  time: ["Where does the time go?", "time"],
  staleness: ["How stale is it?", "staleness"],
  swarm: ["Who is in the swarm?", "swarm"],
  events: ["What happened?", "events"],
};

const sections = Object.fromEntries(Object.keys(QUESTIONS).map((name) => [name, el("section", { id: `view-${name}`, hidden: true, "aria-labelledby": `tab-${name}` })]));
const content = Object.fromEntries(Object.entries(sections).map(([name, section]) => {
  const place = el("div");
  section.append(el("h2", {}, QUESTIONS[name][0]), place);
  return [name, place];
}));
const views = {
  learning: new LearningView(store, content.learning),
  answers: new AnswersView(store, content.answers),
  time: new TimelineView(store, content.time),
  staleness: new StalenessView(store, content.staleness),
  swarm: new SwarmView(store, content.swarm),
  events: new EventsView(store, content.events),
};
let current = "learning";

/** Shows the view that the address names: `#VIEW`, and for answers a path and filters. */
function route() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [name, ...rest] = path.split("/");
  const before = current;
  current = name in QUESTIONS ? name : "learning";
  for (const [key, section] of Object.entries(sections)) section.hidden = key !== current;
  for (const tab of document.querySelectorAll("nav.views a")) {
    if (tab.id === `tab-${current}`) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  document.title = `${store.about.name ?? "run"} – ${QUESTIONS[current][0]}`;
  head();
  if (current === "answers") views.answers.open(rest.join("/"), new URLSearchParams(query));
  else views[/** @type {keyof views} */ (current)].draw();
  if (before !== current) window.scrollTo(0, 0);
}

function draw() {
  head();
  views[/** @type {keyof views} */ (current)].draw();
}

let isDue = false;

/** Draws once for all changes of a moment. */
function soon() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => {
    const start = performance.now();
    isDue = false;
    head();
    if (current === "answers") views.answers.refresh();
    else views[/** @type {keyof views} */ (current)].draw();
    drawMs = performance.now() - start;
  }, Math.max(REDRAW_MS, DRAW_SHARE * drawMs));
}

function head() {
  const { about, events, trouble, file, isLoading } = store;
  const name = document.getElementById("name");
  const state = document.getElementById("state");
  if (!name || !state) return;
  name.textContent = oneLine(about.name ?? "", 80);
  const alarms = events.filter((event) => ALARMS.has(event.event)).length;
  const parts = [about.model ? `${oneLine(about.model, 60)}, engine ${about.engine}` : "", about.state ?? "", file ? `a file of ${moment(file.made_at)}` : isLoading ? "loading …" : ""];
  state.replaceChildren(parts.filter(Boolean).join(" · "), alarms ? el("span", {}, " · ", el("a", { href: "#events", class: "alarm" }, `⚠ ${alarms} alarm${alarms > 1 ? "s" : ""} or advice`)) : "", trouble ? el("strong", { class: "alarm" }, ` · ${trouble}`) : "");
}

function build() {
  const tabs = Object.entries(QUESTIONS).map(([name, [label, short]], i) =>
    el("a", { href: `#${name}`, id: `tab-${name}`, accesskey: String(i + 1), title: `key ${i + 1}` }, el("span", { class: "long" }, label), el("span", { class: "narrow" }, short)));
  const theme = el("button", { type: "button", id: "theme", "aria-label": "light or dark" }, "◐");
  theme.addEventListener("click", () => {
    const isDark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
    draw();
  });
  document.body.replaceChildren(
    el("a", { href: "#main", class: "skip", onclick: (/** @type {Event} */ e) => { e.preventDefault(); document.getElementById("main")?.focus(); } }, "skip to the content"),
    el("header", {}, el("div", { class: "title" }, el("h1", { id: "name" }), el("p", { id: "state", role: "status" }), theme), el("nav", { class: "views", "aria-label": "questions" }, ...tabs)),
    el("main", { id: "main", tabindex: -1 }, ...Object.values(sections)));
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return;
    const name = Object.keys(QUESTIONS)[Number(event.key) - 1];
    if (name) location.hash = `#${name}`;
  });
  addEventListener("hashchange", route);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

async function start() {
  build();
  route();
  try {
    if (store instanceof LiveStore) store.listen();
    else if (block) await loadFile(store, block);
  } catch (error) {
    store.isLoading = false;
    store.trouble = `the data of this file cannot be read: ${error instanceof Error ? error.message : error}`;
  }
  route();
}

store.onChange(soon);
start();
