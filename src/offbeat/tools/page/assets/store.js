/** What the views show: data that lie in this file, or that a server sends and keeps up to date. */

/**
 * @typedef {Record<string, any>} Row
 * @typedef {{columns: string[], rows: any[][], is_last: boolean}} AnswerPage
 */

/** States of an answer that only a resume can change. */
const FINAL = new Set(["trained", "dropped", "evaluated", "failed"]);
/** Texts that are kept when others are loaded. */
const KEPT_TEXTS = 500;

/** Everything known of one run; views subscribe to changes with `onChange`. */
export class Store {
  constructor() {
    /** @type {Row} */ this.about = {};
    this.survivors = new Survivors();
    /** @type {Set<string>} names of all metrics that are numbers */ this.names = new Set();
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
    for (const row of rows) {
      this.survivors.add(row);
      for (const name in row) if (typeof row[name] === "number") this.names.add(name);
    }
    this.metrics = this.survivors.rows;
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

  /** Number of answers that the ledger has. */
  get numAnswers() {
    const made = this.ledger.report?.producers ?? [];
    return made.reduce((/** @type {number} */ n, /** @type {Row} */ p) => n + p.num_trajectories, 0);
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

/** One row a step, without rows that a later attempt undid: `survivors` of `metric_files`, for rows that come in parts. */
class Survivors {
  constructor() {
    /** @type {Map<number, Row>} */ this.kept = new Map();
    this.begun = new Set();
  }

  /** @param {Row} row */
  add(row) {
    const attempt = row.attempt ?? 1;
    if ("reward" in row && !this.begun.has(attempt)) {
      this.begun.add(attempt);
      for (const [step, old] of this.kept) if (step >= row.step && (old.attempt ?? 1) < attempt) this.kept.delete(step);
    }
    const before = this.kept.get(row.step);
    this.kept.set(row.step, before ? { ...before, ...row } : row);
  }

  /** @returns {Row[]} */
  get rows() {
    return [...this.kept.values()].sort((a, b) => a.step - b.step);
  }
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

/** A store that a server keeps up to date. */
export class LiveStore extends Store {
  constructor() {
    super();
    this.isAsking = false;
    this.hasMore = false;
  }

  /** Begins to listen; a browser that was asleep goes on from its last event. */
  listen() {
    const source = new EventSource("data/changes");
    source.addEventListener("open", () => { this.trouble = ""; this.changed(); });
    source.addEventListener("error", () => {
      this.trouble = source.readyState === EventSource.CLOSED ? "no connection: load this page again by its whole link" : "the connection is lost; trying again …";
      this.changed();
    });
    source.addEventListener("message", (event) => this.take(JSON.parse(event.data)));
  }

  /** @param {Row} change */
  take(change) {
    if (change.is_whole) {
      this.survivors = new Survivors();
      this.metrics = [];
      this.events = [];
    }
    if (change.about) this.about = change.about;
    if (change.metrics) this.addMetrics(change.metrics);
    if (change.events) {
      this.events.push(...change.events);
      if (!change.is_whole && change.events.some((/** @type {Row} */ e) => e.event === "resume")) this.answers = [];
    }
    if (change.timeline) {
      const spans = change.is_whole || !this.timeline ? [] : this.timeline.spans;
      spans.push(...change.timeline.spans);
      this.timeline = { ...change.timeline, spans };
    }
    if (change.ledger) {
      this.ledger = change.ledger;
      if (change.ledger.report) this.ask();
      else this.isLoading = false;
    }
    this.changed();
  }

  /** Loads answers that are new, or that may have changed. */
  async ask() {
    this.hasMore = true;
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      while (this.hasMore) {
        this.hasMore = false;
        let after = this.settled, isLast = false;
        while (!isLast) {
          const page = await fetched(`data/answers?after=${after}`);
          this.addAnswers(page);
          isLast = page.is_last;
          if (page.rows.length) after = page.rows[page.rows.length - 1][0];
          this.isLoading = !isLast;
          this.changed();
        }
      }
    } catch (error) {
      this.trouble = `the answers could not be loaded: ${error instanceof Error ? error.message : error}`;
      this.changed();
    } finally {
      this.isAsking = false;
    }
  }

  /** @param {number[]} tasks */
  async textsOf(tasks) {
    const states = new Map(this.answers.map((answer) => [answer.task, answer.state]));
    const missing = tasks.filter((task) => !(task in this.texts));
    const loaded = missing.length ? await fetched(`data/texts?tasks=${missing.join(",")}`) : {};
    const found = await super.textsOf(tasks);
    if (Object.keys(this.texts).length > KEPT_TEXTS) this.texts = {};
    for (const [task, text] of Object.entries(loaded)) if (FINAL.has(states.get(Number(task)))) this.texts[task] = text;
    return { ...found, ...loaded };
  }
}

/** @param {string} address @returns {Promise<any>} */
async function fetched(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}
