/** What the views show of a run: data that lie in this file, or that a server sends and keeps up to date. */

/**
 * @typedef {Record<string, any>} Row
 * @typedef {(number|null)[]} Column
 * @typedef {{rows: Row[], found: number, known: number, all: number, choices: Record<string, string[]>}} Answers
 */

/** States of an answer that only a resume can change. */
const FINAL = new Set(["trained", "dropped", "evaluated", "failed"]);
/** Texts that are kept when others are loaded. */
const KEPT_TEXTS = 500;

/** Curves of metrics: of each bucket of `size` steps the mean, and the lowest and highest if it has several. */
export class Curves {
  constructor() {
    this.size = 1;
    this.numRows = 0;
    /** @type {Record<string, number[]>} x axes by name */ this.x = { step: [], samples: [], tokens: [], hours: [] };
    /** @type {Map<string, Column[]>} mean and perhaps lowest and highest, by metric */ this.columns = new Map();
  }

  /** Number of buckets. */
  get length() {
    return this.x.step.length;
  }

  /** @param {Row} part curves as the server sends them: all buckets from number `at` on are replaced */
  take(part) {
    const { at } = part;
    this.size = part.size;
    this.numRows = part.num_rows;
    for (const name in this.x) this.x[name] = [...this.x[name].slice(0, at), ...part.x[name]];
    for (const name of new Set([...this.columns.keys(), ...Object.keys(part.columns)])) {
      const old = at ? this.columns.get(name) ?? [] : [], more = part.columns[name];
      if (!more) {
        this.columns.delete(name); // of another metric that was asked for once
        continue;
      }
      this.columns.set(name, more.map((/** @type {Column} */ values, /** @type {number} */ i) => {
        const before = (old[i] ?? []).slice(0, at);
        while (before.length < at) before.push(null);
        return [...before, ...values];
      }));
    }
  }

  /** @param {string} name @returns {Column} */
  mean(name) {
    return this.columns.get(name)?.[0] ?? this.x.step.map(() => null);
  }

  /** Lowest (1) or highest (2) values of the buckets; null if a bucket is one step. @param {string} name @param {1|2} which @returns {Column|null} */
  end(name, which) {
    return this.columns.get(name)?.[which] ?? null;
  }

  /** @param {string} name */
  has(name) {
    return this.columns.get(name)?.[0].some((v) => v !== null) ?? false;
  }
}

/** @param {Row} part @returns {Curves} */
export function curvesOf(part) {
  const made = new Curves();
  made.take({ ...part, at: 0 });
  return made;
}

/** Everything known of one run; views subscribe to changes with `onChange`. */
export class Store {
  /** @param {string} name of the run */
  constructor(name) {
    this.name = name;
    /** @type {Row} */ this.about = { name };
    this.curves = new Curves();
    /** @type {Row} the last row, the first and last evaluation, and the times of the last steps */ this.latest = { row: null, first_eval: null, last_eval: null, recent: [] };
    /** @type {Set<string>} names of all metrics that are numbers */ this.names = new Set();
    /** @type {Row[]} */ this.events = [];
    /** @type {Row} */ this.ledger = {};
    /** @type {Row|null} what a file leaves out; null on a served page */ this.file = null;
    /** @type {string} error or state of the connection, in words */ this.trouble = "";
    /** Share of metrics.jsonl that the curves are made of. */ this.shareRead = 1;
    this.isLoading = true;
  }

  /** @param {Row} part */
  takeMetrics(part) {
    this.curves.take(part);
    this.latest = { row: part.row, first_eval: part.first_eval, last_eval: part.last_eval, recent: part.recent };
    this.names = new Set(part.names);
    this.shareRead = part.share_read ?? 1;
  }

  /** @param {string[]} names @param {[number, number]|null} steps a closer look at these @returns {Promise<Curves>} */
  async closer(names, steps) {
    throw new Error(`not here: ${names} ${steps}`);
  }

  /** @param {Row} asked conditions @param {string} order @param {number} from @param {number} count @returns {Promise<Answers>} */
  async find(asked, order, from, count) {
    throw new Error(`not here: ${asked} ${order} ${from} ${count}`);
  }

  /** @param {number[]} tasks @returns {Promise<Row>} texts by task; a task is missing if its text is not here */
  async textsOf(tasks) {
    throw new Error(`not here: ${tasks}`);
  }

  /** @param {number[]} tasks @returns {Promise<Row>} beginnings of prompt and response by task */
  async previewsOf(tasks) {
    return this.textsOf(tasks);
  }

  /** @param {number|null} begin @param {number|null} end wall times; null: of the whole run @returns {Promise<Row>} */
  async timelineOf(begin, end) {
    throw new Error(`not here: ${begin} ${end}`);
  }
}

const ORDERS = {
  newest: (/** @type {Row} */ a, /** @type {Row} */ b) => b.seq - a.seq,
  oldest: (/** @type {Row} */ a, /** @type {Row} */ b) => a.seq - b.seq,
  best: (/** @type {Row} */ a, /** @type {Row} */ b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.seq - a.seq,
  worst: (/** @type {Row} */ a, /** @type {Row} */ b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.seq - a.seq,
  longest: (/** @type {Row} */ a, /** @type {Row} */ b) => b.num_tokens - a.num_tokens || b.seq - a.seq,
};
export const ORDER_NAMES = Object.keys(ORDERS);
/** Whether an answer meets a condition, by its name in the address. @type {Record<string, (a: Row, v: string) => boolean>} */
const MEETS = {
  version: (a, v) => a.first_version !== null && a.first_version <= Number(v) && Number(v) <= a.last_version,
  min_reward: (a, v) => a.reward !== null && a.reward >= Number(v),
  max_reward: (a, v) => a.reward !== null && a.reward <= Number(v),
  min_length: (a, v) => a.num_tokens >= Number(v),
  max_length: (a, v) => a.num_tokens <= Number(v),
};
for (const name of ["purpose", "source", "worker", "state"]) MEETS[name] = (a, v) => a[name] === v;
for (const name of ["step", "task", "group", "ordinal", "member"]) MEETS[name] = (a, v) => a[name] === Number(v);

/** A run whose data lie in this file. */
export class FileStore extends Store {
  /** @param {Row} data */
  constructor(data) {
    super(data.about.name);
    for (const name of ["about", "events", "ledger", "file", "texts", "timeline"]) /** @type {any} */ (this)[name] = data[name];
    this.takeMetrics(data.metrics);
    const names = data.answers.columns;
    /** @type {Row[]} */ this.answers = data.answers.rows.map((/** @type {any[]} */ row) => Object.fromEntries(row.map((value, i) => [names[i], value])));
    this.isLoading = false;
  }

  /** @param {string[]} _names @param {[number, number]|null} _steps */
  async closer(_names, _steps) {
    return this.curves;
  }

  /** @param {Row} asked @param {string} order @param {number} from @param {number} count */
  async find(asked, order, from, count) {
    const tests = Object.entries(asked).filter(([name, value]) => name in MEETS && value !== "" && value !== null && value !== undefined);
    const found = this.answers.filter((answer) => tests.every(([name, value]) => MEETS[name](answer, String(value))));
    found.sort(ORDERS[/** @type {keyof ORDERS} */ (order)] ?? ORDERS.newest);
    const choices = Object.fromEntries(["purpose", "source", "worker", "state"].map((name) => [name, [...new Set(this.answers.map((a) => a[name]))].sort()]));
    return { rows: found.slice(from, from + count), found: found.length, known: this.answers.length, all: this.file?.num_answers, choices };
  }

  /** @param {number[]} tasks */
  async textsOf(tasks) {
    const { texts } = /** @type {any} */ (this);
    return Object.fromEntries(tasks.filter((task) => task in texts).map((task) => [task, texts[task]]));
  }

  /** @param {number[]} tasks */
  async previewsOf(tasks) {
    const texts = await this.textsOf(tasks);
    return Object.fromEntries(Object.entries(texts).map(([task, text]) => [task, { prompt: text.prompt, response: text.is_pruned ? null : text.segments.map((/** @type {Row} */ s) => (s.pieces ?? []).join("")).join("") }]));
  }

  /** @param {number|null} _begin @param {number|null} _end */
  async timelineOf(_begin, _end) {
    return /** @type {any} */ (this).timeline;
  }
}

/** A run that a server keeps up to date. */
export class LiveStore extends Store {
  /** @param {string} name */
  constructor(name) {
    super(name);
    /** @type {Row} texts by task that can no longer change */ this.texts = {};
    /** Grows with every change of the answers. */ this.answersNumber = 0;
    /** @type {Row} */ this.numAnswers = { num_known: 0, num_all: 0 };
  }

  /** @param {Row} change */
  take(change) {
    if (change.is_whole) this.events = [];
    if (change.about) this.about = change.about;
    if (change.metrics) {
      this.takeMetrics(change.metrics);
      this.isLoading = false;
    }
    if (change.events) this.events.push(...change.events);
    if (change.ledger) this.ledger = change.ledger;
    if (change.answers) {
      this.numAnswers = change.answers;
      this.answersNumber += 1;
    }
    if ("trouble" in change) this.trouble = change.trouble;
  }

  /** @param {string[]} names @param {[number, number]|null} steps */
  async closer(names, steps) {
    const asked = new URLSearchParams(names.map((name) => ["name", name]));
    if (steps) {
      asked.set("low", String(steps[0]));
      asked.set("high", String(steps[1]));
    }
    return curvesOf(await this.fetched("metrics", asked));
  }

  /** @param {Row} asked @param {string} order @param {number} from @param {number} count */
  async find(asked, order, from, count) {
    const words = Object.entries(asked).filter(([, value]) => value !== "" && value !== null && value !== undefined).map(([name, value]) => [name, String(value)]);
    const told = await this.fetched("answers", new URLSearchParams([...words, ["order", order], ["from", String(from)], ["count", String(count)]]));
    const rows = told.rows.map((/** @type {any[]} */ row) => Object.fromEntries(row.map((value, i) => [told.columns[i], value])));
    for (const row of rows) if (!FINAL.has(row.state)) delete this.texts[row.task];
    return { rows, found: told.num_found, known: told.num_known, all: told.num_all, choices: told.choices };
  }

  /** @param {number[]} tasks */
  async textsOf(tasks) {
    const missing = tasks.filter((task) => !(task in this.texts));
    if (Object.keys(this.texts).length > KEPT_TEXTS) this.texts = {};
    const loaded = missing.length ? await this.fetched("texts", new URLSearchParams({ tasks: missing.join(",") })) : {};
    Object.assign(this.texts, loaded);
    return Object.fromEntries(tasks.filter((task) => task in this.texts).map((task) => [task, this.texts[task]]));
  }

  /** @param {number[]} tasks */
  async previewsOf(tasks) {
    return this.fetched("texts", new URLSearchParams({ tasks: tasks.join(","), brief: "1" }));
  }

  /** @param {number|null} begin @param {number|null} end */
  async timelineOf(begin, end) {
    return this.fetched("timeline", new URLSearchParams(begin === null || end === null ? {} : { begin: String(begin), end: String(end) }));
  }

  /** @param {string} what @param {URLSearchParams} asked @returns {Promise<any>} */
  async fetched(what, asked) {
    asked.set("run", this.name);
    const response = await fetch(`data/${what}?${asked}`);
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  }
}

/** The runs of this page: `stores` by name, of which `current` is looked at. */
export class Runs {
  constructor() {
    /** @type {Map<string, Store>} */ this.stores = new Map();
    /** @type {Store} */ this.current = new Store("");
    this.trouble = "";
    /** @type {Set<() => void>} */ this._listeners = new Set();
  }

  get all() {
    return [...this.stores.values()];
  }

  /** @param {() => void} listener */
  onChange(listener) {
    this._listeners.add(listener);
  }

  changed() {
    for (const listener of this._listeners) listener();
  }

  /** @param {Store} store */
  add(store) {
    this.stores.set(store.name, store);
    if (this.stores.size === 1) this.current = store;
  }

  /** Reads the data in this file. @param {HTMLElement} block */
  async load(block) {
    const packed = Uint8Array.from(atob(block.textContent ?? ""), (c) => c.charCodeAt(0));
    block.remove();
    const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const data = JSON.parse(await new Response(plain).text());
    for (const run of data.runs) this.add(new FileStore(run));
  }

  /** Begins to listen to the server; a browser that was asleep goes on from its last event. */
  listen() {
    const source = new EventSource("data/changes");
    source.addEventListener("open", () => { this.trouble = ""; this.changed(); });
    source.addEventListener("error", () => {
      this.trouble = source.readyState === EventSource.CLOSED ? "no connection: load this page again by its whole link" : "the connection is lost; trying again … If the run has ended, offbeat page shows it";
      this.changed();
    });
    source.addEventListener("message", (event) => {
      for (const change of JSON.parse(event.data).runs) {
        if (!this.stores.has(change.run)) this.add(new LiveStore(change.run));
        /** @type {LiveStore} */ (this.stores.get(change.run)).take(change);
      }
      this.changed();
    });
  }
}
