/** "What did it write?": a list of answers with filters, one answer in full, and a group side by side. */

import { addText, duration, el, empty, integer, moment, number, oneLine, table, textBlock } from "./text.js";
import { PALETTE } from "./charts.js";
import { ORDER_NAMES } from "./store.js";

/** @typedef {import("./store.js").Row} Row */

const PAGE = 50;
/** Tokens that are shown one by one before the reader asks for the rest. */
const SHOWN_TOKENS = 4000;
/** Conditions: name in the address, and label. */
const FILTERS = {
  purpose: "for", step: "step", source: "task", worker: "worker", version: "version", state: "state",
  min_reward: "reward ≥", max_reward: "reward ≤", min_length: "tokens ≥", max_length: "tokens ≤",
};
const CHOICES = ["purpose", "source", "worker", "state"];
/** Most answers of one group, or to one prompt of the evaluations, that are shown together. */
const MOST_TOGETHER = 500;

/** The view; its address is `#answers?FILTERS`, `#answers/TASK` or `#answers/group/GROUP`. */
export class AnswersView {
  /** @param {import("./store.js").Store} store @param {HTMLElement} place */
  constructor(store, place) {
    this.store = store;
    this.place = place;
    this.path = "";
    this.asked = new URLSearchParams();
    this.shade = "version";
    this.drawing = 0;
    /** @type {(() => void)|null} */ this.whenDrawn = null;
  }

  /** Draws again after a change, unless the reader is busy with a filter or has an answer open that is there already. */
  refresh() {
    const isTyping = this.place.contains(document.activeElement) && /^(INPUT|SELECT)$/.test(document.activeElement?.tagName ?? "");
    const isOpen = this.path !== "" && this.place.querySelector(".response") !== null;
    if (!isTyping && !isOpen) this.draw();
  }

  /** @param {string} path after `#answers` @param {URLSearchParams} asked */
  open(path, asked) {
    if (path !== this.path) this.place.replaceChildren(empty(path ? "loading the answer …" : "loading the answers …"));
    this.path = path;
    this.asked = asked;
    return this.draw();
  }

  async draw() {
    const drawing = ++this.drawing;
    const [what, id] = this.path.split("/").filter(Boolean);
    let content;
    try {
      if (what === "group") content = await this.group(Number(id));
      else if (what) content = await this.one(Number(what));
      else content = await this.list();
    } catch (error) {
      content = [empty(`This could not be loaded: ${error instanceof Error ? error.message : error}`)];
    }
    if (drawing !== this.drawing) return;
    this.place.replaceChildren(...content);
    this.whenDrawn?.();
  }

  async list() {
    const { store } = this, { file } = store;
    const from = Math.max(0, Math.floor(Number(this.asked.get("from") ?? 0)) || 0);
    const asked = Object.fromEntries(Object.keys(FILTERS).map((name) => [name, this.asked.get(name) ?? ""]));
    const told = await store.find(asked, this.asked.get("order") ?? "newest", from, PAGE);
    if (!told.known) return [empty(told.all || store.isLoading ? "reading the answers …" : "No answer has been accepted yet. They appear here as soon as a worker hands them in.")];
    const shown = told.rows;
    const previews = new Map(shown.map((a) => [a.task, el("span", { class: "preview" }, "…")]));
    this.whenDrawn = () => {
      this.whenDrawn = null;
      store.previewsOf(shown.map((a) => a.task)).then(
        (texts) => previews.forEach((cell, task) => preview(cell, texts[task])),
        (error) => previews.forEach((cell) => cell.replaceChildren(`not loaded: ${error.message}`)));
    };
    const rows = shown.map((a) => [
      el("a", { href: `#answers/${a.task}` }, `${a.task}`),
      a.purpose === "eval" ? el("span", { class: "short" }, `eval ${a.step ?? "–"}`) : (a.step ?? "–"), a.error ? "failed" : number(a.reward),
      previews.get(a.task), a.num_tokens, span(a), a.ended_by, a.state,
      el("span", { class: "short" }, oneLine(a.source, 30)), el("span", { class: "short" }, oneLine(a.worker, 30)),
      el("a", { href: `#answers/group/${a.group}` }, `${a.group}`),
    ]);
    const head = ["answer", "step", "reward", "prompt → response", "tokens", "versions", "end", "state", "task", "worker", "group"];
    const left = file && told.all > told.known ? ` (this file holds ${integer(told.known)} of the run's ${integer(told.all)}: every ${integer(file.stride)}th group)` : "";
    const loading = !file && told.all > told.known ? `, of ${integer(told.all)} that are being read` : "";
    return [
      this.form(told.choices),
      el("p", { class: "count", role: "status" }, `${integer(told.found)} of ${integer(told.known)} answers${left}${loading}`),
      shown.length ? table(head, rows) : empty("No answer passes these filters."),
      this.pages(from, told.found),
    ];
  }

  /** @param {Record<string, string[]>} choices */
  form(choices) {
    const fields = Object.entries(FILTERS).map(([name, label]) => {
      const value = this.asked.get(name) ?? "";
      const id = `filter-${name}`;
      const field = CHOICES.includes(name)
        ? el("select", { id, name }, el("option", { value: "" }, "all"), ...choices[name].map((v) => el("option", { value: v, selected: v === value }, oneLine(v, 40))))
        : el("input", { id, name, value, inputmode: "decimal", size: 5 });
      return el("label", { for: id }, `${label} `, field);
    });
    const order = el("select", { name: "order", id: "filter-order" }, ...ORDER_NAMES.map((v) => el("option", { value: v, selected: v === (this.asked.get("order") ?? "newest") }, v)));
    const form = el("form", { class: "controls" }, ...fields, el("label", { for: "filter-order" }, "order ", order), el("a", { href: "#answers", class: "button" }, "clear"));
    form.addEventListener("submit", (/** @type {Event} */ event) => event.preventDefault());
    form.addEventListener("change", () => {
      const asked = new URLSearchParams();
      for (const [name, value] of new FormData(form)) if (value !== "" && !(name === "order" && value === "newest")) asked.set(name, String(value).trim());
      location.hash = asked.size ? `#answers?${asked}` : "#answers";
    });
    return form;
  }

  /** @param {number} from @param {number} count */
  pages(from, count) {
    const to = (/** @type {number} */ start) => {
      const asked = new URLSearchParams(this.asked);
      asked.set("from", String(start));
      return `#answers?${asked}`;
    };
    return el("nav", { class: "pages", "aria-label": "pages of answers" },
      from > 0 ? el("a", { href: to(Math.max(0, from - PAGE)) }, "← before") : null,
      count ? el("span", {}, `${integer(from + 1)}–${integer(Math.min(count, from + PAGE))}`) : null,
      from + PAGE < count ? el("a", { href: to(from + PAGE) }, "after →") : null);
  }

  /** @param {number} task */
  async one(task) {
    const told = await this.store.find({ task }, "oldest", 0, 1), row = told.rows[0];
    if (!row) return [back(), empty(!this.store.file && told.all > told.known || !told.all ? "reading the answers …" : `Answer ${task} is not in ${this.store.file ? "this file" : "this run, or is not finished yet"}.`)];
    const text = (await this.store.textsOf([task]))[task];
    const around = [
      el("a", { href: `#answers/group/${row.group}` }, "its group side by side"),
      row.step !== null ? el("a", { href: `#answers?step=${row.step}&purpose=${row.purpose}` }, row.purpose === "eval" ? `the evaluation after step ${row.step}` : `all of step ${row.step}`) : null,
    ];
    const same = row.purpose === "eval" ? (await this.store.find({ purpose: "eval", ordinal: row.ordinal, member: row.member }, "oldest", 0, MOST_TOGETHER)).rows : [];
    const early = same.length > 1 ? el("p", {}, "The same prompt, after step ", ...same.flatMap((a, i) => [i ? " · " : "", a.task === task ? el("strong", {}, `${a.step}`) : el("a", { href: `#answers/${a.task}` }, `${a.step}`)]), ".") : null;
    return [
      back(),
      el("h3", { tabindex: -1 }, `answer ${task}`),
      figures(row),
      el("p", { class: "links" }, ...around.filter(Boolean).flatMap((link, i) => (i ? [" · ", link] : [link]))),
      early,
      ...this.body(row, text, true),
    ].filter(Boolean);
  }

  /** @param {number} group */
  async group(group) {
    const told = await this.store.find({ group }, "oldest", 0, MOST_TOGETHER), rows = told.rows.sort((a, b) => a.member - b.member);
    if (!rows.length) return [back(), empty(!this.store.file && told.all > told.known || !told.all ? "reading the answers …" : `Group ${group} has no answer here.`)];
    const texts = await this.store.textsOf(rows.map((a) => a.task));
    const rewards = rows.filter((a) => a.reward !== null).map((a) => a.reward);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const prompt = texts[rows[0].task]?.prompt;
    const right = texts[rows[0].task]?.right;
    return [
      back(),
      el("h3", {}, `group ${group}`),
      el("p", {}, `${rows.length === 1 ? "1 answer" : `${rows.length} answers`} to one prompt, mean reward ${number(mean)}; ${rows[0].purpose === "eval" ? `evaluation after step ${rows[0].step}` : rows[0].step === null ? "in no step yet" : `step ${rows[0].step}`}`),
      ...(prompt === undefined ? [] : [el("h4", {}, "prompt"), textBlock(prompt, "prompt")]),
      ...(right === undefined || right === null ? [] : [el("h4", {}, "right answer"), textBlock(right)]),
      this.shades(),
      el("div", { class: "side-by-side" }, ...rows.map((row) => el("article", {},
        el("h4", {}, el("a", { href: `#answers/${row.task}` }, `answer ${row.task}`)),
        el("p", { class: "small" }, `reward ${row.error ? "failed" : number(row.reward)}${mean === null || row.reward === null ? "" : `, ${row.reward - mean >= 0 ? "+" : "−"}${number(Math.abs(row.reward - mean))} to the mean`}, ${row.num_tokens} tokens, ended by ${row.ended_by}`),
        ...this.body(row, texts[row.task], false)))),
    ];
  }

  /** @param {Row} row @param {Row|undefined} text @param {boolean} isWhole */
  body(row, text, isWhole) {
    if (!text) return [empty(this.store.file && !this.store.file.with_text ? "Prompts and answers were left out of this file (--without-text)." : "The text of this answer is not here.")];
    const parts = [];
    if (isWhole) {
      if (text.prompt !== undefined) parts.push(el("h4", {}, "prompt"), textBlock(text.prompt, "prompt"));
      if (text.right !== undefined && text.right !== null) parts.push(el("h4", {}, "right answer"), textBlock(text.right));
      parts.push(el("h4", {}, "response"), this.shades());
    }
    if (text.is_pruned) parts.push(empty("The response was deleted to save space (ledger.keep_bodies)."));
    else parts.push(response(text, this.shade));
    if (text.error) parts.push(el("h4", {}, "why its reward failed"), textBlock(text.error));
    if (!isWhole) return parts;
    parts.push(legend(text));
    if (text.rewards.length > 1 || text.rewards.some((/** @type {Row} */ r) => r.weight !== 1)) parts.push(table(["part of the reward", "value", "weight", "position"], text.rewards.map((/** @type {Row} */ r) => [oneLine(r.name, 60), number(r.value), number(r.weight), r.position < 0 ? "end" : r.position])));
    if (text.history) parts.push(el("h4", {}, "history"), table(["when", "what"], text.history.map((/** @type {Row} */ e) => [moment(e.at), oneLine(e.what, 400)])));
    return parts;
  }

  shades() {
    const choice = (/** @type {string} */ value, /** @type {string} */ label) => el("label", {}, el("input", { type: "radio", name: "shade", value, checked: this.shade === value, onchange: () => { this.shade = value; this.draw(); } }), ` ${label} `);
    const key = /** @type {Record<string, [string, string]>} */ ({ logprob: ["likely", "below −2.8"], staleness: ["0 steps", "4 or more"] })[this.shade];
    const scale = key ? el("span", { class: "scale" }, `${key[0]} `, ...[0, 1, 2, 3, 4].map((heat) => el("span", { class: `token heat${heat}` }, "  ")), ` ${key[1]}`) : null;
    return el("fieldset", { class: "shades" }, el("legend", {}, "tokens coloured by"), choice("version", "version"), choice("logprob", "log-prob"), choice("staleness", "staleness"), choice("none", "nothing"), scale);
  }
}

/** @param {Row} a */
function span(a) {
  if (a.first_version === null) return "–";
  return a.first_version === a.last_version ? `${a.first_version}` : `${a.first_version}–${a.last_version}`;
}

/** Fills the cell of a list with the beginning of a text. @param {HTMLElement} cell @param {Row|undefined} text */
function preview(cell, text) {
  if (!text || text.prompt === undefined) return cell.replaceChildren(el("em", {}, "no text"));
  cell.replaceChildren(el("span", { class: "muted" }, oneLine(text.prompt, 80)), " → ", text.response === null ? "(deleted)" : oneLine(text.response, 160));
}

/** @param {Row} row */
function figures(row) {
  /** @type {[string, string][]} */ const facts = [
    ["reward", row.error ? "failed" : number(row.reward)], ["tokens", integer(row.num_tokens)], ["ended by", row.ended_by],
    ["versions", span(row)], ["worker", oneLine(row.worker, 60)], ["task", oneLine(row.source, 60)],
    [row.purpose === "eval" ? "evaluated after step" : "step", row.step === null ? "none yet" : `${row.step}`], ["state", row.state], ["accepted", moment(row.accepted_at)],
  ];
  return el("dl", { class: "tiles small" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { "data-fact": name }, value))));
}

function back() {
  return el("p", {}, el("a", { href: "#answers" }, "← all answers"));
}

/** The response with its tokens coloured. @param {Row} text @param {string} shade */
function response(text, shade) {
  const block = el("pre", { class: "text response", tabindex: 0 });
  if (!text.segments.length) block.append(el("em", {}, "empty"));
  if (text.segments.length && text.segments[0].pieces === undefined) return empty("Prompts and answers were left out of this file (--without-text).");
  const order = versions(text);
  let left = SHOWN_TOKENS;
  const fill = (/** @type {number} */ skip) => {
    for (const segment of text.segments) {
      const pieces = segment.pieces;
      for (let i = 0; i < pieces.length; i += 1) {
        if (skip > 0) { skip -= 1; continue; }
        if (left === 0) return;
        left -= 1;
        const logprob = segment.logprobs ? segment.logprobs[i] : null;
        const token = el("span", { class: `token ${tokenClass(segment, shade, logprob, order)}`, title: tokenTitle(segment, i, logprob) });
        addText(token, pieces[i]);
        block.append(token);
      }
    }
  };
  fill(0);
  const total = text.segments.reduce((/** @type {number} */ n, /** @type {Row} */ s) => n + s.pieces.length, 0);
  if (total > SHOWN_TOKENS) {
    const more = el("button", { type: "button" }, `show all ${integer(total)} tokens`);
    more.addEventListener("click", () => { more.remove(); left = Infinity; fill(SHOWN_TOKENS); });
    block.append(more);
  }
  return block;
}

/** @param {Row} text @returns {(number|null)[]} */
function versions(text) {
  return [...new Set(text.segments.map((/** @type {Row} */ s) => s.version))].filter((v) => v !== null).sort((a, b) => a - b);
}

/** @param {Row} segment @param {string} shade @param {number|null} logprob @param {(number|null)[]} order */
function tokenClass(segment, shade, logprob, order) {
  if (segment.version === null) return "given";
  if (shade === "version") return `bg-${PALETTE[order.indexOf(segment.version) % PALETTE.length]}`;
  if (shade === "logprob" && logprob !== null) return `heat${Math.min(4, Math.floor(-logprob / 0.7))}`;
  if (shade === "staleness") return segment.staleness === null ? "untrained" : `heat${Math.min(4, segment.staleness)}`;
  return "";
}

/** @param {Row} segment @param {number} i @param {number|null} logprob */
function tokenTitle(segment, i, logprob) {
  const given = segment.version === null ? "given, not sampled" : `version ${segment.version}`;
  return `token ${segment.start + i}, ${given}${logprob === null ? "" : `, log-prob ${logprob.toFixed(3)}`}`;
}

/** @param {Row} text */
function legend(text) {
  const order = versions(text);
  const rows = text.segments.map((/** @type {Row} */ s) => [
    `${s.start}–${s.start + s.num_tokens - 1}`,
    s.version === null ? "given" : el("span", { class: `token bg-${PALETTE[order.indexOf(s.version) % PALETTE.length]}` }, `version ${s.version}${s.is_abandoned ? ", abandoned" : ""}`),
    s.step ?? "–", s.staleness ?? "not trained", oneLine(s.worker || "–", 40), oneLine(s.engine || "–", 200),
    s.logprobs && s.logprobs.length ? number(s.logprobs.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / s.logprobs.length) : "–",
  ]);
  return table(["tokens", "version", "of step", "staleness", "worker", "engine", "mean log-prob"], rows);
}

/** @param {Row} lease */
export function leaseInWords(lease) {
  return `task ${lease.task} by ${oneLine(lease.worker, 40)}, for ${duration(lease.seconds)}`;
}
