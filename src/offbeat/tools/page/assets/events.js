/** "What happened?": events, with alarms marked. */

import { addText, duration, el, empty, oneLine, table } from "./text.js";

/** Events that a person should act upon. */
export const ALARMS = new Set(["logprob_gap", "backup_failed", "quarantine", "evaluation_left_out", "set_aside", "clamped", "unused_weights", "advice", "not_finite", "error"]);
const KNOWN = new Set(["event", "time", "seconds", "attempt", "text"]);

export class EventsView {
  /** @param {import("./store.js").Store} store @param {HTMLElement} place */
  constructor(store, place) {
    this.store = store;
    this.list = el("div");
    this.only = el("input", { type: "checkbox", id: "only-alarms", onchange: () => this.draw() });
    place.append(el("p", { class: "controls" }, el("label", {}, this.only, " alarms and advice only")), this.list);
  }

  draw() {
    const { events, isLoading } = this.store;
    const shown = events.filter((event) => !this.only.checked || ALARMS.has(event.event)).reverse();
    if (!shown.length) {
      this.list.replaceChildren(empty(isLoading ? "loading …" : events.length ? "No alarm and no advice: nothing that you should act upon." : "Nothing has happened yet."));
      return;
    }
    this.list.replaceChildren(table(["when", "after", "attempt", "event", "more"], shown.map((event) => {
      const isAlarm = ALARMS.has(event.event);
      const more = el("span", { class: "wrap" });
      addText(more, event.text ?? details(event));
      return [event.time.replace("T", " ").replace(/\+.*/, ""), duration(event.seconds ?? 0), event.attempt ?? 1, el("strong", { class: isAlarm ? "alarm" : null }, `${isAlarm ? "⚠ " : ""}${oneLine(event.event, 60)}`), more];
    })));
  }
}

/** @param {Record<string, any>} event */
function details(event) {
  const parts = Object.entries(event).filter(([name]) => !KNOWN.has(name));
  return parts.map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
}
