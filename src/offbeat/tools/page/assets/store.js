/** What the views show: data that lie in this file, or that a server sends and keeps up to date. */

/**
 * @typedef {Record<string, any>} Row
 * @typedef {{columns: string[], rows: any[][], is_last: boolean}} AnswerPage
 */

/** States of an answer that only a resume can change. */
const FINAL = new Set(["trained", "dropped", "evaluated", "failed"]);
const REPORT_EVERY_MS = 5000;

/** Everything known of one run; views subscribe to changes with `onChange`. */
export class Store {
  constructor() {
    /** @type {Row} */ this.about = {};
    /** @type {Row[]} rows of metrics.jsonl in the order of the file */ this.written = [];
    /** @type {Row[]} rows that survive resumes, one a step */ this.metrics = [];
    /** @type {Row[]} */ this.events = [];
    /** @type {Row} */ this.ledger = {};
    /** @type {Row|null} */ this.timeline = null;
    /** @type {Row[]} answers in order of acceptance */ this.answers = [];
    /** @type {Row} texts by task */ this.texts = {};
    /** @type {Row|null} what a file leaves out; null on a served page */ this.file = null;
    /** @type {string} error or state of the connection, in words */ this.trouble = "";
    this.isLoading = true;
    /** @type {Set<() => void>} */ this._listeners = new Set();
  }

  /** @param {() => void} listener */
  onChange(listener) {
    this._listeners.add(listener);
  }

  changed() {
    for (const listener of this._listeners) listener();
  }

  /** @param {Row[]} rows further rows of metrics.jsonl */
  addMetrics(rows) {
    this.written.push(...rows);
    this.metrics = survivors(this.written);
  }

  /** @param {AnswerPage} page answers, sorted; those that are known already are replaced */
  addAnswers(page) {
    const names = page.columns;
    const made = page.rows.map((row) => Object.fromEntries(row.map((value, i) => [names[i], value])));
    if (!made.length) return;
    let end = this.answers.length;
    while (end > 0 && this.answers[end - 1].seq >= made[0].seq) end -= 1;
    this.answers.length = end;
    for (const answer of made) this.answers.push(answer);
  }

  /** Number after which answers may still change. */
  get settled() {
    const open = this.answers.find((answer) => !FINAL.has(answer.state));
    const last = this.answers.length ? this.answers[this.answers.length - 1].seq : 0;
    return open ? open.seq - 1 : last;
  }

  /**
   * Returns the texts of `tasks`, by task; a task is missing if its text is not in this file.
   * @param {number[]} tasks
   * @returns {Promise<Row>}
   */
  async textsOf(tasks) {
    return Object.fromEntries(tasks.filter((task) => task in this.texts).map((task) => [task, this.texts[task]]));
  }
}

/**
 * Returns one row a step, without rows that a later attempt undid, as `survivors` of `metric_files` does.
 * @param {Row[]} rows
 * @returns {Row[]}
 */
export function survivors(rows) {
  /** @type {Map<number, Row>} */ let kept = new Map();
  const begun = new Set();
  for (const row of rows) {
    const attempt = row.attempt ?? 1;
    if ("reward" in row && !begun.has(attempt)) {
      begun.add(attempt);
      kept = new Map([...kept].filter(([step, old]) => step < row.step || (old.attempt ?? 1) >= attempt));
    }
    kept.set(row.step, { ...kept.get(row.step), ...row });
  }
  return [...kept.values()].sort((a, b) => a.step - b.step);
}

/** Fills a store from the data in this file. */
export async function loadFile(/** @type {Store} */ store, /** @type {HTMLElement} */ block) {
  const packed = Uint8Array.from(atob((block.textContent ?? "").trim()), (c) => c.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = JSON.parse(await new Response(plain).text());
  for (const name of ["about", "events", "ledger", "timeline", "texts", "file"]) /** @type {any} */ (store)[name] = data[name];
  store.addMetrics(data.metrics);
  store.addAnswers(data.answers);
  store.isLoading = false;
}
