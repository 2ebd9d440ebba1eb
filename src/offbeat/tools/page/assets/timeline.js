/** "Where does the time go?": a time line of all roles, their shares, and what limits the run. */

import { colour, PALETTE } from "./charts.js";
import { ALARMS } from "./events.js";
import { duration, el, empty, integer, moment, oneLine, percent, table } from "./text.js";

/** @typedef {import("./store.js").Row} Row */
/** @typedef {[number, number, number, number, number|null, number, number]} Span track, name, start, seconds, answers, steps trained before, number of spans that it sums up */

/** A window is loaded when the reader has stopped moving it, and again after a while, because a run goes on. */
const SETTLE_MS = 120, RELOAD_MS = 3000;
const LANE_HEIGHT = 34, LABEL_WIDTH = 110, AXIS_HEIGHT = 24;
/** Steps over which the limit of the run is judged. */
const JUDGED_STEPS = 20, MIN_STEPS = 3;
const MOST = 0.5, MUCH = 0.25;

/**
 * Returns one sentence on what limits the run and what to try, or why it is withheld.
 * @param {Row[]} metrics @param {Row[]} events @param {string} mode of the schedule
 */
export function limit(metrics, events, mode) {
  const rows = metrics.filter((row) => row.seconds > 0 && "time_train_s" in row).slice(-JUDGED_STEPS);
  if (rows.length < MIN_STEPS) return `What limits the run is judged after ${MIN_STEPS} steps.`;
  const last = rows[rows.length - 1], first = rows[0];
  const alarm = [...events].reverse().find((e) => ALARMS.has(e.event) && (e.attempt ?? 1) === (last.attempt ?? 1) && (e.step === undefined || e.step >= first.step));
  if (alarm) return `What limits the run is not judged while there is an alarm or advice (${oneLine(alarm.event, 40)}): see “What happened?” first.`;
  const sum = (/** @type {string} */ name) => rows.reduce((n, row) => n + (row[name] ?? 0), 0);
  const total = sum("seconds"), wait = sum("time_wait_s") / total, train = sum("time_train_s") / total;
  const write = (sum("time_publish_s") + sum("time_checkpoint_s")) / total;
  const over = `of the last ${rows.length} steps' time`;
  if (wait >= MOST && sum("time_reward_s") > sum("time_generate_s")) return `Rewards limit the run: the trainer waits ${percent(wait)} ${over}, mostly for them. Raise reward.processes, or make the reward faster.`;
  if (wait >= MOST) return `Generation limits the run: the trainer waits ${percent(wait)} ${over}. Add workers, or raise rollout.slots${mode === "overlap" ? "" : '; or let them generate while the trainer trains (schedule.mode = "overlap")'}.`;
  if (train >= MOST) return `Training limits the run: it takes ${percent(train)} ${over}, so more workers would not help. Give the trainer a faster device, or raise batch.tokens_per_microbatch.`;
  if (write >= MUCH) return `Writing limits the run: versions and checkpoints take ${percent(write)} ${over}. Raise checkpoint.every, or use a faster disk.`;
  return `No part limits the run alone: waiting takes ${percent(wait)} ${over}, training ${percent(train)}, versions and checkpoints ${percent(write)}.`;
}

export class TimelineView {
  /** @param {import("./store.js").Store} store @param {HTMLElement} place */
  constructor(store, place) {
    this.store = store;
    this.sentence = el("p", { class: "limit", "data-limit": true });
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "time line; + and - zoom, the arrow keys move, 0 shows all" });
    this.about = el("p", { class: "small", role: "status" });
    this.tables = el("div");
    const zoom = (/** @type {string} */ label, /** @type {string} */ title, /** @type {() => void} */ act) => el("button", { type: "button", title, onclick: act }, label);
    this.buttons = el("p", { class: "controls" }, zoom("+", "closer", () => this.zoom(0.5)), zoom("−", "farther", () => this.zoom(2)), zoom("←", "earlier", () => this.move(-0.5)), zoom("→", "later", () => this.move(0.5)), zoom("all", "all of it", () => this.all()), zoom("newest", "the newest steps", () => this.newest()));
    place.append(this.sentence, this.buttons, el("div", { class: "timeline" }, this.canvas), this.about, this.tables);
    this.begin = 0;
    this.end = 0;
    /** @type {Row|null} what was loaded last: some window of the time line */ this.loaded = null;
    /** @type {Span[][]} spans by track */ this.lanes = [];
    this.asking = 0;
    this.askedAt = 0;
    /** @type {[number, number]|null} seconds from the beginning; null: all */ this.window = null;
    this.canvas.addEventListener("wheel", (/** @type {WheelEvent} */ e) => { e.preventDefault(); this.zoom(e.deltaY > 0 ? 1.25 : 0.8, this.share(e)); }, { passive: false });
    this.canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ e) => { this.from = e.clientX; this.canvas.setPointerCapture(e.pointerId); });
    this.canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ e) => this.point(e));
    this.canvas.addEventListener("pointerup", () => { this.from = null; });
    this.canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => this.key(e));
    /** @type {number|null} */ this.from = null;
    /** @type {import("./store.js").Store|null} run that was loaded */ this.of = null;
    /** @type {any} */ this.timer = 0;
    new ResizeObserver(() => this.paint()).observe(this.canvas.parentElement);
  }

  draw() {
    const { store } = this;
    this.sentence.textContent = limit(store.latest.recent, store.events, store.about.mode);
    if (this.of !== store) {
      this.of = store;
      this.window = this.loaded = null;
    }
    this.show();
    // What has come since is loaded every few seconds; another window at once, in `set`.
    if (!this.loaded || Date.now() - this.askedAt > RELOAD_MS) this.load();
  }

  /** Loads the shown window, and a half of it on both sides. */
  async load() {
    const asking = ++this.asking, [low, high] = this.shown(), half = (high - low) / 2, { store } = this;
    this.askedAt = Date.now();
    try {
      const found = this.window && this.loaded ? await store.timelineOf(this.begin + low - half, this.begin + high + half) : await store.timelineOf(null, null);
      if (asking !== this.asking || store !== this.store) return;
      this.loaded = found;
      this.show();
    } catch (error) {
      this.tables.replaceChildren(empty(`The time line could not be loaded: ${error instanceof Error ? error.message : error}`));
    }
  }

  show() {
    const timeline = this.loaded, hasSpans = Boolean(timeline?.spans.length);
    this.canvas.hidden = this.buttons.hidden = !hasSpans;
    if (!timeline || !hasSpans) {
      this.tables.replaceChildren(empty(timeline ? "No span has been recorded yet. They come with the first step." : "loading …"));
      this.about.textContent = "";
      return;
    }
    this.begin = timeline.begin;
    this.end = timeline.end;
    this.lanes = timeline.tracks.map(() => []);
    for (const span of timeline.spans) this.lanes[span[0]].push(span);
    this.paint();
    this.tables.replaceChildren(this.shares(timeline));
  }

  /** @param {Row} timeline */
  shares(timeline) {
    const whole = this.end - this.begin;
    const rows = timeline.sums.map((/** @type {number[]} */ [track, name, count, seconds]) => ({ track, who: oneLine(timeline.tracks[track], 40), what: oneLine(timeline.names[name], 40), count, seconds }))
      .sort((/** @type {Row} */ a, /** @type {Row} */ b) => a.track - b.track || b.seconds - a.seconds);
    return el("section", {}, el("h3", {}, "Shares"), table(["who", "what", "times", "time", "seconds", "share"], rows.map((/** @type {Row} */ row) => [row.who, row.what, integer(row.count), duration(row.seconds), row.seconds.toFixed(3), percent(row.seconds / whole)])),
      el("p", { class: "small" }, `Of ${duration(whole)} from the first span to the last, loading not included.`));
  }

  /** Shown window in seconds from the beginning. @returns {[number, number]} */
  shown() {
    return this.window ?? [0, Math.max(this.end - this.begin, 1e-3)];
  }

  /** @param {number} factor @param {number} at share of the window that stays in place */
  zoom(factor, at = 0.5) {
    const [low, high] = this.shown(), fixed = low + at * (high - low), whole = this.end - this.begin;
    const span = Math.max(1e-3, (high - low) * factor);
    if (span >= whole) return this.all();
    this.set(fixed - at * span, span);
  }

  /** @param {number} share of the window */
  move(share) {
    const [low, high] = this.shown();
    this.set(low + share * (high - low), high - low);
  }

  all() {
    this.window = null;
    this.paint();
    this.loadSoon();
  }

  newest() {
    const from = (this.loaded?.newest ?? this.begin) - this.begin;
    this.set(from, this.end - this.begin - from);
  }

  /** @param {number} low @param {number} span */
  set(low, span) {
    const whole = this.end - this.begin, start = Math.min(Math.max(0, low), Math.max(0, whole - span));
    this.window = [start, start + span];
    this.paint();
    this.loadSoon();
  }

  loadSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), SETTLE_MS);
  }

  /** @param {{clientX: number}} event */
  share(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left - LABEL_WIDTH) / (box.width - LABEL_WIDTH)));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const acts = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), 0: () => this.all() };
    const act = /** @type {Record<string, () => void>} */ (acts)[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  /** @param {PointerEvent} event */
  point(event) {
    const [low, high] = this.shown(), box = this.canvas.getBoundingClientRect();
    if (this.from !== null && event.buttons) {
      this.move((this.from - event.clientX) / (box.width - LABEL_WIDTH));
      this.from = event.clientX;
      return;
    }
    const at = this.begin + low + this.share(event) * (high - low), lane = Math.floor((event.clientY - box.top - AXIS_HEIGHT) / LANE_HEIGHT);
    const span = (this.lanes[lane] ?? []).find((s) => s[2] <= at && at <= s[2] + s[3]);
    const names = this.loaded?.names ?? [];
    this.about.textContent = span
      ? `${oneLine(names[span[1]], 40)}${span[6] > 1 ? `, ${integer(span[6])} short spans, zoom to see each` : ""}: ${duration(span[3])} from ${moment(span[2])}${span[4] === null ? "" : `, ${integer(span[4])} answers`}, ${integer(span[5])} steps trained before`
      : hint();
  }

  paint() {
    const timeline = this.loaded, lanes = this.lanes;
    const width = this.canvas.parentElement.clientWidth;
    if (!timeline || !width || this.canvas.hidden) return;
    const height = AXIS_HEIGHT + LANE_HEIGHT * lanes.length, scale = devicePixelRatio;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const [low, high] = this.shown(), room = width - LABEL_WIDTH, perSecond = room / (high - low);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.axis(pen, low, high, perSecond, height);
    const shades = PALETTE.map((name) => colour(name)), ground = colour("ground"), ink = colour("ink");
    lanes.forEach((spans, lane) => {
      const top = AXIS_HEIGHT + lane * LANE_HEIGHT;
      for (const [, name, start, seconds, , steps] of spans) {
        const x = LABEL_WIDTH + (start - this.begin - low) * perSecond, w = Math.max(1, seconds * perSecond - 0.5);
        if (x + w < LABEL_WIDTH || x > width) continue;
        const isWait = timeline.names[name] === "wait";
        pen.globalAlpha = isWait ? 0.3 : 1;
        pen.fillStyle = isWait ? colour("muted") : shades[steps % shades.length];
        pen.fillRect(Math.max(x, LABEL_WIDTH), top + 4, Math.min(w, width - x, w + x - LABEL_WIDTH), LANE_HEIGHT - 8);
        pen.globalAlpha = 1;
        if (w > 60) {
          pen.fillStyle = isWait ? ink : ground;
          pen.fillText(oneLine(timeline.names[name], 30), Math.max(x, LABEL_WIDTH) + 5, top + LANE_HEIGHT / 2, w - 8);
        }
      }
      pen.fillStyle = ground;
      pen.fillRect(0, top, LABEL_WIDTH, LANE_HEIGHT);
      pen.fillStyle = ink;
      pen.fillText(oneLine(timeline.tracks[lane], 24), 0, top + LANE_HEIGHT / 2, LABEL_WIDTH - 8);
    });
    if (!this.about.textContent) this.about.textContent = hint();
  }

  /** @param {CanvasRenderingContext2D} pen @param {number} low @param {number} high @param {number} perSecond @param {number} height */
  axis(pen, low, high, perSecond, height) {
    const rough = (high - low) / 6, size = 10 ** Math.floor(Math.log10(rough));
    const gap = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= rough) ?? rough;
    pen.fillStyle = colour("muted");
    pen.strokeStyle = colour("grid");
    for (let t = Math.ceil(low / gap) * gap; t <= high; t += gap) {
      const x = LABEL_WIDTH + (t - low) * perSecond;
      pen.beginPath();
      pen.moveTo(x, AXIS_HEIGHT - 4);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillText(clock(Math.max(0, t), gap), x + 2, AXIS_HEIGHT / 2);
    }
  }
}

/** A time on the axis, as hours, minutes and seconds, as finely as its marks are apart. @param {number} seconds @param {number} gap */
function clock(seconds, gap) {
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(gap) + 1e-9)));
  const rounded = Number(seconds.toFixed(digits)), minutes = Math.floor(rounded / 60);
  if (minutes === 0) return `${rounded.toFixed(digits)} s`;
  const left = (rounded - 60 * minutes).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return minutes < 60 ? `${minutes}:${left}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${left}`;
}

function hint() {
  return "Colours change with each version that is trained; grey is waiting. Wheel or + and − zoom, drag or arrow keys move.";
}
