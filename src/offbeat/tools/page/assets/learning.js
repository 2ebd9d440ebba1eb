/** "Is it learning?": curves of the metrics. */

import { chart, closeCharts } from "./charts.js";
import { el, empty, number, percent } from "./text.js";

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

/** @param {Row[]} rows @param {string} name */
export function column(rows, name) {
  return rows.map((row) => (typeof row[name] === "number" && Number.isFinite(row[name]) ? row[name] : null));
}

/** Mean held-out reward of a row, `eval_mean@K` for any K. @param {Row} row @returns {number|null} */
export function heldOut(row) {
  const name = Object.keys(row).find((key) => key.startsWith("eval_mean@"));
  return name ? row[name] : null;
}

/** Values of the x axis `kind`: steps, or running sums. @param {Row[]} rows @param {string} kind */
export function xValues(rows, kind) {
  if (kind === "step") return rows.map((row) => row.step);
  let sum = 0;
  return rows.map((row) => (sum += kind === "hours" ? (row.seconds ?? 0) / 3600 : (row[kind] ?? 0)));
}

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

/** The view; `place` is its section. */
export class LearningView {
  /** @param {import("./store.js").Store} store @param {HTMLElement} place */
  constructor(store, place) {
    this.store = store;
    this.figures = el("dl", { class: "tiles" });
    this.charts = el("div", { class: "charts" });
    this.names = el("datalist", { id: "metric-names" });
    this.x = el("select", { id: "x-axis", onchange: () => this.draw() },
      ...Object.entries(X_AXES).map(([value, label]) => el("option", { value }, label)));
    this.window = el("input", { type: "range", id: "smoothing", min: 1, max: 51, step: 2, value: 1, oninput: () => this.draw() });
    this.windowText = el("output", { for: "smoothing" });
    this.isLog = el("input", { type: "checkbox", id: "log-axis", onchange: () => this.draw() });
    this.asked = el("input", { id: "metric", list: "metric-names", placeholder: "any metric, such as lr", onchange: () => this.ask(), autocomplete: "off" });
    /** @type {string[]} */ this.more = [];
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

  ask() {
    const name = this.asked.value.trim();
    if (!name) return;
    if (!this.store.names.has(name)) {
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
    const rows = this.store.metrics;
    closeCharts(this.charts);
    this.charts.replaceChildren();
    this.tiles(rows);
    if (!rows.length) {
      this.charts.append(empty(this.store.isLoading ? "loading the metrics …" : "No step is finished yet, so there is no metric to draw. The first row comes with the first step or evaluation."));
      return;
    }
    if (!this.hasChosenWindow) this.window.value = rows.length >= 50 ? String(1 + 2 * Math.min(25, Math.round(rows.length / 50))) : "1";
    const window = Number(this.window.value);
    this.windowText.value = window === 1 ? "1 step (no smoothing)" : `${window} steps`;
    const { names } = this.store;
    this.names.replaceChildren(...[...names].sort().map((name) => el("option", { value: name })));
    const x = xValues(rows, this.x.value), xName = X_AXES[/** @type {keyof X_AXES} */ (this.x.value)];
    const common = { x, xName, isLog: this.isLog.checked };
    const lines = (/** @type {string[]} */ wanted) => wanted.filter((name) => names.has(name)).flatMap((name, i) => this.lines(rows, name, window, i));
    for (const name of this.more) this.charts.append(chart({ title: name, lines: lines([name]), ...common }));
    this.charts.append(chart({ title: "reward", about: this.spreadText(rows), lines: this.rewardLines(rows, window), height: 300, ...common }));
    const parts = [...names].filter((name) => /^(reward|part)\//.test(name) || /^eval\/.*_mean@/.test(name)).sort();
    if (parts.length) this.charts.append(chart({ title: "reward by task and part", lines: lines(parts), ...common }));
    for (const [title, wanted, about] of /** @type {[string, string[], string][]} */ (CHARTS)) {
      const known = lines(wanted);
      if (known.some((line) => line.values.some((v) => v !== null))) this.charts.append(chart({ title, about, lines: known, from0: true, ...common }));
    }
  }

  /** @param {Row[]} rows @param {string} name @param {number} window @param {number} i */
  lines(rows, name, window, i) {
    const values = column(rows, name), shade = `c${(i % 8) + 1}`;
    if (window === 1) return [{ label: name, values, colour: shade }];
    return [
      { label: name, values, kind: /** @type {const} */ ("faint"), colour: shade },
      { label: `${name}, mean of ${window}`, values: smoothed(values, window), colour: shade },
    ];
  }

  /** @param {Row[]} rows @param {number} window */
  rewardLines(rows, window) {
    const mean = column(rows, "reward"), std = column(rows, "reward_std");
    const shifted = (/** @type {number} */ sign) => mean.map((v, i) => (v === null || std[i] === null ? null : v + sign * /** @type {number} */ (std[i])));
    /** @type {import("./charts.js").Line[]} */ const lines = this.lines(rows, "reward", window, 0);
    lines.push({ label: "mean + std", values: shifted(1), kind: "band", colour: "c1" }, { label: "mean − std", values: shifted(-1), kind: "band", colour: "c1" });
    const held = rows.map(heldOut);
    if (held.some((v) => v !== null)) lines.push({ label: "held-out", values: held, kind: "points", colour: "c2" });
    return lines;
  }

  /** @param {Row[]} rows */
  spreadText(rows) {
    const last = [...rows].reverse().find((row) => heldOut(row) !== null);
    const n = last ? `; held-out over n = ${number(last.eval_samples ?? last.eval_prompts)} answers` + (last.eval_failed ? `, ${last.eval_failed} failed` : "") : "";
    return `training mean with the standard deviation of samples${n}`;
  }

  /** @param {Row[]} rows */
  tiles(rows) {
    const steps = rows.filter((row) => "reward" in row), last = steps[steps.length - 1];
    const evals = rows.filter((row) => heldOut(row) !== null), judged = evals[evals.length - 1];
    const wanted = this.store.about.steps;
    /** @type {[string, string][]} */ const tiles = [
      ["step", last ? `${last.step}${wanted ? ` / ${wanted}` : ""}` : "0"],
      ["reward", last ? `${number(last.reward)} ± ${number(last.reward_std)}` : "–"],
      ["held-out", judged ? `${number(heldOut(evals[0]))} → ${number(heldOut(judged))} (n = ${number(judged.eval_samples)})` : "–"],
      ["tokens/s", last ? number(last.tokens_per_second) : "–"],
      ["signal", last ? percent(last.signal_share) : "–"],
      ["staleness", last ? `${number(last.staleness)} (max ${number(last.staleness_max)})` : "–"],
    ];
    this.figures.replaceChildren(...tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { "data-tile": name }, value))));
  }
}
