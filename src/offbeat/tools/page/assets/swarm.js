/** "Who is in the swarm?": what each worker made, holds and failed, and what the trainer waits for. */

import { leaseInWords } from "./answers.js";
import { duration, el, empty, integer, moment, number, oneLine, percent, table } from "./text.js";

export class SwarmView {
  /** @param {import("./store.js").Store} store @param {HTMLElement} place */
  constructor(store, place) {
    this.store = store;
    this.place = place;
  }

  draw() {
    const { ledger, isLoading, curves } = this.store;
    if (!ledger.report) {
      this.place.replaceChildren(empty(isLoading || curves.length ? "reading the ledger …" : "The ledger is not there yet: the run has not begun."));
      return;
    }
    const { report, workers, read_at } = ledger;
    const total = report.producers.reduce((/** @type {number} */ n, /** @type {any} */ p) => n + p.num_tokens, 0);
    const joined = new Map(workers.map((/** @type {any} */ w) => [w.name, w]));
    const names = [...new Set([...report.producers.map((/** @type {any} */ p) => p.worker), ...joined.keys()])];
    const rows = names.map((name) => {
      const made = report.producers.find((/** @type {any} */ p) => p.worker === name) ?? {}, member = joined.get(name);
      const { engine = "", device = "", version = null } = ledger.makers?.[name] ?? {};
      const rate = made.seconds > 0 ? made.num_tokens / made.seconds : null;
      const state = member ? (member.is_away ? "away" : member.state) + (member.reason ? `: ${oneLine(member.reason, 80)}` : "") : "in this process";
      return [
        el("a", { href: `#answers?worker=${encodeURIComponent(name)}` }, oneLine(name, 40)), member?.role ?? "rollout",
        el("span", { class: "short", title: oneLine(engine, 300) }, oneLine(engine.split(" ")[0], 30) || "–"), device || "–", version ?? "–",
        report.set_aside[name] ? `set aside ${oneLine(report.set_aside[name], 120)}` : state,
        integer(made.num_trajectories ?? 0), integer(made.num_tokens ?? 0), percent(total ? (made.num_tokens ?? 0) / total : null), number(rate === null ? null : Math.round(rate)),
        made.num_leased ?? 0, made.num_partials ?? 0, made.num_failed ?? 0, made.num_compared ? `${integer(made.num_off)} of ${integer(made.num_compared)}` : "–",
        member ? moment(member.joined_at) : "–", member?.last_seen_at ? `${duration(Math.max(0, read_at - member.last_seen_at))} before` : "–",
      ];
    });
    const lease = report.oldest_lease;
    const lost = Object.entries(report.suspects).map(([times, n]) => `${n} lost ${times} times`).join(", ");
    this.place.replaceChildren(
      names.length ? table(["worker", "role", "engine", "device", "version", "state", "answers", "tokens", "share", "tokens/s", "leased", "partials", "failed", "log-prob off", "joined", "last heard"], rows) : empty("No worker has joined and none has made an answer."),
      el("h3", {}, "What the trainer waits for"),
      table(["what", "now"], [
        ["the next batch", oneLine(report.waits_for, 400)],
        ["oldest lease", lease ? leaseInWords(lease) : "none"],
        ["tasks that workers vanished with", lost || "none"],
        ["next to train", report.step === null ? "no version yet" : `step ${report.step}, from version ${report.version}`],
        ["read from the ledger", moment(read_at)],
      ]),
      el("h3", {}, "The newest versions"),
      table(["version", "of step", "tokens sampled", ""], report.versions.map((/** @type {any} */ v) => [v.number, v.step, integer(v.num_tokens), v.is_abandoned ? "abandoned" : ""])),
    );
  }
}
