/** "How stale is it?": trained tokens by age, waste by cause, and whether every token has its one place. */

import { chart, closeCharts, PALETTE } from "./charts.js";
import { el, empty, integer, percent, table } from "./text.js";

const AGE = /^num_tokens\/staleness_(.+)$/;

export class StalenessView {
  /** @param {import("./store.js").Store} store @param {HTMLElement} place */
  constructor(store, place) {
    this.store = store;
    this.charts = el("div", { class: "charts" });
    this.tables = el("div", { class: "columns" });
    place.append(this.charts, this.tables);
  }

  draw() {
    const { curves, ledger, about, isLoading } = this.store;
    closeCharts(this.charts);
    if (curves.has("staleness")) this.charts.replaceChildren(...this.curves(about.max_staleness));
    else this.charts.replaceChildren(empty(isLoading ? "loading …" : "No step is trained yet, so no token has an age."));
    this.tables.replaceChildren(...(ledger.report ? this.sums() : [empty(isLoading || curves.length ? "reading the ledger …" : "The ledger is not there yet: the run has not begun.")]));
  }

  /** @param {number|null} bound */
  curves(bound) {
    const { curves } = this.store, x = curves.x.step;
    const ages = [...this.store.names].map((key) => AGE.exec(key)?.[1]).filter(Boolean).sort((a, b) => parseInt(/** @type {string} */ (a)) - parseInt(/** @type {string} */ (b)));
    const mean = [{ label: "mean", values: curves.mean("staleness"), low: curves.end("staleness", 1), high: curves.end("staleness", 2) }, { label: "oldest", values: curves.end("staleness_max", 2) ?? curves.mean("staleness_max") }];
    const lines = bound === null || bound === undefined ? mean : [...mean, { label: "bound", values: x.map(() => bound), kind: /** @type {const} */ ("band"), colour: "alarm" }];
    const made = [chart({ title: "staleness", about: "of the tokens trained, in steps", x, xName: "step", lines, from0: true })];
    if (ages.length) {
      const sums = x.map(() => 0);
      const areas = ages.map((age, i) => {
        const values = curves.mean(`num_tokens/staleness_${age}`).map((v, n) => (sums[n] += v ?? 0));
        return { label: age === "0" ? "of this step" : `${age} ${age === "1" ? "step" : "steps"} old`, values, kind: /** @type {const} */ ("area"), colour: PALETTE[i % PALETTE.length] };
      });
      made.push(chart({ title: "trained tokens by age", about: curves.size > 1 ? "a step, stacked" : "stacked", x, xName: "step", lines: areas.reverse(), from0: true }));
    }
    return made;
  }

  sums() {
    const { report } = this.store.ledger;
    const tokens = report.counts.tokens, trained = Object.values(report.staleness).reduce((/** @type {number} */ a, b) => a + b, 0);
    const places = [["trained", tokens.trained], ...entries("masked", tokens.masked), ["waiting", tokens.waiting], ["in partials", tokens.partial], ...entries("wasted", tokens.wasted), ["evaluated", tokens.evaluated]];
    const placed = places.reduce((sum, [, n]) => sum + n, 0);
    const holds = placed === tokens.generated;
    const bound = this.store.about.max_staleness;
    const within = bound === null || bound === undefined || report.counts.max_staleness_trained <= bound;
    return [
      el("section", {}, el("h3", {}, "Where every token went"),
        el("p", { class: holds ? "holds" : "alarm", "data-holds": String(holds) }, `${holds ? "✓" : "✗"} ${integer(tokens.generated)} tokens were generated, and ${holds ? "each has one place" : `${integer(placed)} are accounted for`}.`),
        table(["tokens", "count", "share"], places.map(([name, n]) => [name, integer(n), percent(tokens.generated ? n / tokens.generated : null)]))),
      el("section", {}, el("h3", {}, "How old trained tokens were"),
        el("p", { class: within ? "holds" : "alarm" }, `${within ? "✓" : "✗"} The oldest was ${report.counts.max_staleness_trained} steps old; the bound is ${bound ?? "unknown"}.`),
        table(["staleness", "tokens", "share"], Object.entries(report.staleness).map(([age, n]) => [age, integer(n), percent(trained ? n / trained : null)]))),
      el("section", {}, el("h3", {}, "Unfinished and dropped"),
        table(["what", "count"], [["partials waiting or carried on", integer(report.num_partials)], ...entries("groups dropped", report.counts.dropped_groups).map(([a, n]) => [a, integer(n)]), ...entries("tasks failed", report.counts.failed_tasks).map(([a, n]) => [a, integer(n)]), ["versions published", integer(report.counts.num_versions)], ["versions abandoned by a resume", integer(report.num_abandoned_versions)]])),
    ];
  }
}

/** @param {string} name @param {Record<string, number>} counts @returns {[string, number][]} */
function entries(name, counts) {
  return Object.entries(counts).map(([reason, n]) => [`${name}: ${reason}`, n]);
}
