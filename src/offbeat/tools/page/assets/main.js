/** The page: its views, their addresses, light and dark. */

import { AnswersView } from "./answers.js";
import { EventsView, ALARMS } from "./events.js";
import { LearningView } from "./learning.js";
import { StalenessView } from "./staleness.js";
import { Runs } from "./store.js";
import { SwarmView } from "./swarm.js";
import { TimelineView } from "./timeline.js";
import { el, moment, oneLine, percent } from "./text.js";

const REDRAW_MS = 150;
/** A long run, which is slow to draw, is drawn again after so many times the time that it took. */
const DRAW_SHARE = 4;
let drawMs = 0;
const block = document.getElementById("run-data");
const runs = new Runs();

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
  learning: new LearningView(runs, content.learning),
  answers: new AnswersView(runs.current, content.answers),
  time: new TimelineView(runs.current, content.time),
  staleness: new StalenessView(runs.current, content.staleness),
  swarm: new SwarmView(runs.current, content.swarm),
  events: new EventsView(runs.current, content.events),
};
let current = "learning";

/** The view, path and query that the address names: `#VIEW/PATH?QUERY`. */
function address() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [name, ...rest] = path.split("/");
  return { name, path: rest.join("/"), asked: new URLSearchParams(query) };
}

/** Shows the view that the address names: `#VIEW`, for answers a path and filters, and one of several runs as `run=NAME`. */
function route() {
  const { name, path, asked } = address();
  const before = current;
  current = name in QUESTIONS ? name : "learning";
  choose(asked);
  for (const [key, section] of Object.entries(sections)) section.hidden = key !== current;
  for (const tab of document.querySelectorAll("nav.views a")) {
    if (tab.id === `tab-${current}`) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  document.title = `${runs.all.length > 1 && current === "learning" ? `${runs.all.length} runs` : runs.current.about.name || "run"} – ${QUESTIONS[current][0]}`;
  head();
  if (current === "answers") views.answers.open(path, asked);
  else views[/** @type {keyof views} */ (current)].draw();
  if (before !== current) window.scrollTo(0, 0);
}

/** Turns to the run that the address names; an address without one is about the run that is shown. @param {URLSearchParams} asked */
function choose(asked) {
  const [first] = runs.all, wanted = runs.stores.get(asked.get("run") ?? "");
  if (wanted) runs.current = wanted;
  for (const view of [views.answers, views.time, views.staleness, views.swarm, views.events]) view.store = runs.current;
  if (current === "learning") views.learning.shown = asked.has("runs") ? (asked.get("runs") ?? "").split(",") : null;
  else if (runs.all.length > 1 && !asked.has("run") && runs.current !== first) {
    asked.set("run", runs.current.name);
    history.replaceState(null, "", `${location.hash.split("?")[0] || `#${current}`}?${asked}`);
  }
}

function draw() {
  head();
  views[/** @type {keyof views} */ (current)].draw();
}

let isDue = false, numRuns = 0;

/** Draws once for all changes of a moment. */
function soon() {
  if (isDue) return;
  isDue = true;
  // The first picture at once; then no more often than drawing allows.
  setTimeout(() => {
    const start = performance.now();
    isDue = false;
    if (runs.all.length !== numRuns) {
      numRuns = runs.all.length;
      route();
    } else {
      head();
      if (current === "answers") views.answers.refresh();
      else views[/** @type {keyof views} */ (current)].draw();
    }
    drawMs = performance.now() - start;
  }, numRuns ? Math.max(REDRAW_MS, DRAW_SHARE * drawMs) : 0);
}

function head() {
  const { about, events, trouble, file, isLoading, shareRead } = runs.current;
  const name = document.getElementById("name");
  const state = document.getElementById("state");
  const chosen = document.getElementById("run");
  if (!name || !state || !chosen) return;
  const isLaid = runs.all.length > 1 && current === "learning";
  name.textContent = isLaid ? `${runs.all.length} runs` : oneLine(about.name ?? "", 80);
  chosen.hidden = runs.all.length < 2 || isLaid;
  chosen.replaceChildren(...runs.all.map((run) => el("option", { value: run.name, selected: run === runs.current }, oneLine(run.name, 60))));
  const alarms = events.filter((event) => ALARMS.has(event.event)).length;
  const model = about.model && !isLaid ? `${oneLine(about.model, 60)}, engine ${about.engine}` : "";
  const parts = [model, isLaid ? "" : about.state ?? "", file ? `a file of ${moment(file.made_at)}` : isLoading && !runs.trouble ? "loading …" : "", shareRead < 1 ? `a sample of a long run; ${percent(shareRead)} is read` : ""];
  const problems = [runs.trouble, trouble].filter(Boolean).map((text) => el("strong", { class: "alarm" }, ` · ${oneLine(text, 400)}`));
  const alarm = alarms && !isLaid ? [el("span", {}, " · ", el("a", { href: "#events", class: "alarm" }, `⚠ ${alarms} alarm${alarms > 1 ? "s" : ""} or advice`))] : [];
  state.replaceChildren(parts.filter(Boolean).join(" · "), ...alarm, ...problems);
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
    el("header", {}, el("div", { class: "title" }, el("h1", { id: "name" }), el("select", { id: "run", "aria-label": "run", hidden: true, onchange: (/** @type {any} */ e) => { location.hash = `#${current}?${new URLSearchParams({ run: e.target.value })}`; } }), el("p", { id: "state", role: "status" }), theme), el("nav", { class: "views", "aria-label": "questions" }, ...tabs)),
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
    if (block) await runs.load(block);
    else runs.listen();
  } catch (error) {
    runs.trouble = `the data of this file cannot be read: ${error instanceof Error ? error.message : error}`;
  }
  runs.onChange(soon);
  if (block) route();
}

start();
