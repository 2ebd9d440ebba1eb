/** "Is it learning?": curves of the metrics. */

import { chart, closeCharts } from "./charts.js";
import { el, empty, integer, number, oneLine, percent, table } from "./text.js";

/** @typedef {import("./store.js").Row} Row */

/** Charts that are shown unasked where their metrics are known: title, metrics, what they tell. */
const CHARTS = [
  ["length", ["length", "length_max"], "tokens per answer: mean, longest"],
  ["entropy", ["entropy"], "falls to 0 where answers no longer vary"],
  ["signal_share", ["signal_share", "cut_share"], "samples that teach something; answers cut for length"],
  ["logprob_gap", ["logprob_gap"], "engine against trainer, on fresh tokens"],
  ["kl", ["kl"], "to the starting model"],
  ["ess", ["ess", "kept_share"], "effective samples, tokens that the correction kept: shares"],
  ["clip_share", ["clip_share", "clamped_share"], "tokens that the clip held back, or the clamp"],
  ["grad_norm", ["grad_norm"], "before clipping"],
  ["tokens_per_second", ["tokens_per_second"], "of the whole step"],
];
const X_AXES = { step: "step", samples: "samples", tokens: "tokens", hours: "hours" };
const HELD_OUT = "held-out";
const DASHES = [undefined, [8, 4], [2, 3], [8, 3, 2, 3]];

/** Centred running mean over `window` known values. @param {(number|null)[]} values @param {number} window */
export function smoothed(values, window) {
  const at = values.flatMap((v, i) => (v === null ? [] : [i]));
  /** @type {(number|null)[]} */ const out = values.map(() => null);
  const sums = [0];
  for (const i of at) sums.push(sums[sums.length - 1] + /** @type {number} */ (values[i]));
  const half = Math.floor(window / 2);
  at.forEach((i, n) => {
    const low = Math.max(0, n - half), high = Math.min(at.length, n + window - half);
    out[i] = (sums[high] - sums[low]) / (high - low);
  });
  return out;
}

/** Mean held-out reward of a row, `eval_mean@K` for any K. @param {Row|null} row @returns {number|null} */
export function heldOut(row) {
  const name = Object.keys(row ?? {}).find((key) => key.startsWith("eval_mean@"));
  return row && name ? row[name] : null;
}

/**
 * Where a value lies on an x axis, as a step: the last step at which the axis is not beyond `value`.
 * @param {import("./store.js").Curves} curves @param {string} kind @param {number} value
 */
function stepAt(curves, kind, value) {
  const x = curves.x[kind];
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (x[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return kind === "step" ? value : curves.x.step[low] ?? 0;
}

/** The view; `place` is its section. */
export class LearningView {
  /** @param {import("./store.js").Runs} runs @param {HTMLElement} place */
  constructor(runs, place) {
    this.runs = runs;
    this.figures = el("div");
    this.charts = el("div", { class: "charts" });
    this.names = el("datalist", { id: "metric-names" });
    this.x = el("select", { id: "x-axis", onchange: () => { this.zooms.clear(); this.draw(); } },
      ...Object.entries(X_AXES).map(([value, label]) => el("option", { value }, label)));
    this.window = el("input", { type: "range", id: "smoothing", min: 1, max: 51, step: 2, value: 1, oninput: () => this.draw() });
    this.windowText = el("output", { for: "smoothing" });
    this.isLog = el("input", { type: "checkbox", id: "log-axis", onchange: () => this.draw() });
    this.asked = el("input", { id: "metric", list: "metric-names", placeholder: "any metric, such as lr", onchange: () => this.ask(), autocomplete: "off" });
    /** @type {string[]} */ this.more = [];
    /** @type {Map<string, [number, number]>} parts of x axes that are looked at, by chart */ this.zooms = new Map();
    /** @type {Map<string, {key: string, curves: Map<string, import("./store.js").Curves>}>} by chart */ this.details = new Map();
    /** @type {string[]|null} names of the runs that are shown; null: all */ this.shown = null;
    /** @type {{title: string, at: number|null}|null} chart that has the focus, and its cursor */ this.focused = null;
    this.hasChosenWindow = false;
    this.window.addEventListener("input", () => { this.hasChosenWindow = true; });
    place.append(
      this.figures,
      el("form", { class: "controls", onsubmit: (/** @type {Event} */ e) => e.preventDefault() },
        el("label", { for: "x-axis" }, "over "), this.x,
        el("label", { for: "smoothing" }, "mean of "), this.window, this.windowText,
        el("label", {}, this.isLog, " log axis"),
        el("label", { for: "metric" }, "metric "), this.asked, this.names),
      this.charts);
  }

  /** Names of all metrics of all runs. */
  get known() {
    return new Set(this.runs.all.flatMap((run) => [...run.names]));
  }

  ask() {
    const name = this.asked.value.trim();
    if (!name) return;
    if (!this.known.has(name)) {
      this.asked.setCustomValidity(`no row has a metric called ${name}`);
      this.asked.reportValidity();
      return;
    }
    this.asked.setCustomValidity("");
    this.asked.value = "";
    this.more = [name, ...this.more.filter((other) => other !== name)];
    this.draw();
  }

  draw() {
    // A run that goes on is drawn again and again: the reader keeps the chart and the place that the keys moved to.
    const focused = /** @type {any} */ (document.activeElement?.closest("figure.chart"));
    this.focused = focused && this.charts.contains(focused) ? { title: focused.dataset.metric, at: focused.cursor() } : null;
    this.drawAll();
    if (this.focused) this.figureOf(this.focused.title)?.focus({ preventScroll: true });
  }

  /** @param {string} title @returns {HTMLElement|null} */
  figureOf(title) {
    return this.charts.querySelector(`figure[data-metric="${CSS.escape(title)}"]`);
  }

  drawAll() {
    closeCharts(this.charts);
    this.charts.replaceChildren();
    this.tiles();
    const runs = this.runs.all.filter((run) => (this.shown === null || this.shown.includes(run.name)) && run.curves.length);
    if (!runs.length) {
      const isLoading = this.runs.all.some((run) => run.isLoading) || !this.runs.all.length;
      this.charts.append(empty(isLoading ? "loading the metrics …" : this.shown && this.runs.all.some((run) => run.curves.length) ? "No run is chosen." : "No step is finished yet, so there is no metric to draw. The first row comes with the first step or evaluation."));
      return;
    }
    const longest = Math.max(...runs.map((run) => run.curves.length)), size = Math.max(...runs.map((run) => run.curves.size));
    if (!this.hasChosenWindow) this.window.value = longest >= 50 ? String(1 + 2 * Math.min(25, Math.round(longest / 50))) : "1";
    const window = Number(this.window.value);
    this.windowText.value = window * size === 1 ? "1 step (no smoothing)" : `${window * size} steps`;
    const names = this.known;
    this.names.replaceChildren(...[...names].sort().map((name) => el("option", { value: name })));
    for (const name of this.more) this.add(runs, name, "", [name], window, {});
    this.add(runs, "reward", this.spreadText(runs), ["reward"], window, { height: 300 });
    const parts = [...names].filter((name) => /^(reward|part)\//.test(name) || /^eval\/.*_mean@/.test(name)).sort();
    if (parts.length) this.add(runs, "reward by task and part", "", parts, window, {});
    for (const [title, wanted, about] of /** @type {[string, string[], string][]} */ (CHARTS)) {
      if (runs.some((run) => wanted.some((name) => run.curves.has(name)))) this.add(runs, title, about, wanted, window, { from0: true });
    }
  }

  /**
   * Draws a chart of metrics; of several runs, or of a part of a long one, with curves of its own.
   * @param {import("./store.js").Store[]} runs @param {string} title @param {string} about @param {string[]} wanted
   * @param {number} window @param {{height?: number, from0?: boolean}} options
   */
  add(runs, title, about, wanted, window, options) {
    const kind = this.x.value, zoom = this.zooms.get(title) ?? null;
    const detailed = this.detailed(runs, title, wanted, kind, zoom);
    const isOne = this.runs.all.length === 1;
    const tables = runs.map((run) => {
      const curves = detailed.get(run.name) ?? run.curves;
      const place = this.runs.all.indexOf(run);
      const names = wanted.filter((name) => curves.has(name) || (name === "reward" && title === "reward"));
      const lines = names.flatMap((name, i) => this.lines(curves, name, window, isOne ? `c${(i % 8) + 1}` : `c${(place % 8) + 1}`, isOne ? name : names.length > 1 ? `${run.name}: ${name}` : run.name, isOne ? undefined : DASHES[i % DASHES.length]));
      if (title === "reward") lines.push(...this.rewardLines(curves, run, isOne, `c${(place % 8) + 1}`));
      return { x: curves.x[kind], lines };
    });
    const lines = tables.flatMap((table) => table.lines);
    const common = { title, about, xName: X_AXES[/** @type {keyof X_AXES} */ (kind)], isLog: this.isLog.checked, zoom, ...options, cursor: this.focused?.title === title ? this.focused.at : null,
      onZoom: (/** @type {[number, number]|null} */ chosen) => { this.choose(title, chosen); } };
    if (tables.length === 1) {
      this.charts.append(chart({ ...common, x: tables[0].x, lines }));
      return;
    }
    // One x axis for all: what a run has not at a place is missing there, and its line goes on.
    const [x, ...columns] = uPlot.join(tables.map((table) => [table.x, ...table.lines.flatMap((line) => [line.values, line.low ?? line.values, line.high ?? line.values])]));
    const joined = lines.map((line, i) => ({ ...line, values: columns[3 * i].map(orNull), low: line.low ? columns[3 * i + 1].map(orNull) : null, high: line.high ? columns[3 * i + 2].map(orNull) : null }));
    this.charts.append(chart({ ...common, x, lines: joined }));
  }

  /** @param {string} title @param {[number, number]|null} zoom */
  choose(title, zoom) {
    if (zoom) this.zooms.set(title, zoom);
    else this.zooms.delete(title);
    this.focused = null; // the cursor counts from another step now
    this.drawAll();
    this.figureOf(title)?.focus({ preventScroll: true });
  }

  /**
   * Curves that a chart needs besides those that every page has, as far as they are known; asks for the others.
   * @param {import("./store.js").Store[]} runs @param {string} title @param {string[]} wanted @param {string} kind @param {[number, number]|null} zoom
   */
  detailed(runs, title, wanted, kind, zoom) {
    const needy = runs.filter((run) => (zoom && run.curves.size > 1) || wanted.some((name) => run.names.has(name) && !run.curves.columns.has(name)));
    if (!needy.length) return new Map();
    const key = JSON.stringify([kind, zoom, needy.map((run) => [run.name, run.curves.numRows])]);
    const before = this.details.get(title);
    if (before?.key !== key) {
      const curves = before?.curves ?? new Map();
      this.details.set(title, { key, curves });
      const names = title === "reward" ? ["reward", "reward_std", HELD_OUT] : wanted;
      for (const run of needy) {
        const steps = /** @type {[number, number]|null} */ (zoom && zoom.map((value) => stepAt(run.curves, kind, value)));
        run.closer(names, steps).then((found) => {
          if (this.details.get(title)?.key !== key) return;
          this.details.set(title, { key, curves: new Map([...(this.details.get(title)?.curves ?? []), [run.name, found]]) });
          this.runs.changed();
        }, (error) => { this.runs.trouble = `not loaded: ${error.message}`; this.runs.changed(); });
      }
    }
    return this.details.get(title)?.curves ?? new Map();
  }

  /** @param {import("./store.js").Curves} curves @param {string} name @param {number} window @param {string} shade @param {string} label @param {number[]|undefined} dash @returns {import("./charts.js").Line[]} */
  lines(curves, name, window, shade, label, dash) {
    const values = curves.mean(name), edges = { low: curves.end(name, 1), high: curves.end(name, 2) };
    if (window === 1) return [{ label, values, colour: shade, dash, ...edges }];
    const mean = { label: `${label}, mean of ${window * curves.size}`, values: smoothed(values, window), colour: shade, dash };
    return edges.low ? [{ ...mean, ...edges }] : [{ label, values, kind: /** @type {const} */ ("faint"), colour: shade }, mean];
  }

  /** @param {import("./store.js").Curves} curves @param {import("./store.js").Store} run @param {boolean} isOne @param {string} shade @returns {import("./charts.js").Line[]} */
  rewardLines(curves, run, isOne, shade) {
    const mean = curves.mean("reward"), std = curves.mean("reward_std");
    const shifted = (/** @type {number} */ sign) => mean.map((v, i) => (v === null || std[i] === null ? null : v + sign * /** @type {number} */ (std[i])));
    /** @type {import("./charts.js").Line[]} */ const lines = isOne ? [{ label: "mean + std", values: shifted(1), kind: "band", colour: "c1" }, { label: "mean − std", values: shifted(-1), kind: "band", colour: "c1" }] : [];
    if (curves.has(HELD_OUT)) lines.push({ label: isOne ? "held-out" : `${run.name}: held-out`, values: curves.mean(HELD_OUT), kind: "points", colour: isOne ? "c2" : shade });
    return lines;
  }

  /** @param {import("./store.js").Store[]} runs */
  spreadText(runs) {
    const size = Math.max(...runs.map((run) => run.curves.size));
    const bucket = size > 1 ? `; filled: lowest and highest of each ${integer(size)} steps, drag to look closer` : "";
    if (this.runs.all.length > 1) return `training mean, and held-out with points${bucket}`;
    const last = runs[0].latest.last_eval;
    const n = last ? `; held-out over n = ${number(last.eval_samples ?? last.eval_prompts)} answers` + (last.eval_failed ? `, ${last.eval_failed} failed` : "") : "";
    return `training mean with the standard deviation of samples${n}${bucket}`;
  }

  tiles() {
    if (this.runs.all.length > 1) {
      this.figures.replaceChildren(this.chooser());
      return;
    }
    const facts = this.runs.all.length ? newestFigures(this.runs.all[0]) : [];
    this.figures.replaceChildren(el("dl", { class: "tiles" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { "data-tile": name }, value)))));
  }

  /** A table of the runs, in which one chooses those to lay over each other. */
  chooser() {
    const choose = () => {
      const chosen = [...this.figures.querySelectorAll("input:checked")].map((/** @type {any} */ box) => box.value);
      location.hash = chosen.length === this.runs.all.length ? "#learning" : `#learning?${new URLSearchParams({ runs: chosen.join(",") })}`;
    };
    const rows = this.runs.all.map((run, i) => {
      const box = el("input", { type: "checkbox", value: run.name, checked: this.shown === null || this.shown.includes(run.name), onchange: choose });
      return [el("label", {}, box, " ", el("span", { class: `swatch bg-c${(i % 8) + 1}` }), ` ${oneLine(run.name, 40)}`), ...newestFigures(run).map(([, value]) => value)];
    });
    return table(["run", ...newestFigures(this.runs.all[0]).map(([name]) => name)], rows);
  }
}

/** @param {number|null|undefined} v */
function orNull(v) {
  return v === undefined ? null : v;
}

/** The newest figures of a run, by name. @param {import("./store.js").Store} run @returns {[string, string][]} */
function newestFigures(run) {
  const { row: last, first_eval: first, last_eval: judged } = run.latest, wanted = run.about.steps;
  return [
    ["step", last ? `${last.step}${wanted ? ` / ${wanted}` : ""}` : "0"],
    ["reward", last ? `${number(last.reward)} ± ${number(last.reward_std)}` : "–"],
    ["held-out", judged ? `${first.step === judged.step ? "" : `${number(heldOut(first))} → `}${number(heldOut(judged))} (n = ${number(judged.eval_samples)})` : "–"],
    ["tokens/s", last ? number(last.tokens_per_second) : "–"],
    ["signal", last ? percent(last.signal_share) : "–"],
    ["staleness", last ? `${number(last.staleness)} (max ${number(last.staleness_max)})` : "–"],
  ];
}
