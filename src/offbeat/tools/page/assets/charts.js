/** Line charts: uPlot with the page's colours, a cursor that the keyboard moves, and a summary in words. */

import { el, number } from "./text.js";

/**
 * @typedef {(number|null)[]} Column
 * @typedef {{label: string, values: Column, kind?: "line"|"faint"|"points"|"area"|"band"|"edge", colour?: string, dash?: number[], low?: Column|null, high?: Column|null}} Line
 */

/** @type {Set<any>} charts on the page */
const drawn = new Set();

/** Gaps between the marks of an axis of steps. */
const WHOLE = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((zeros) => n * 10 ** zeros)).sort((a, b) => a - b);

/** @param {string} name of a CSS variable, without dashes */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const PALETTE = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];

/**
 * A figure with a chart of `lines` over `x`. Where lines have `low` and `high`, the space between is filled. The reader
 * chooses a part of the x axis by dragging, or with + and -; then `onZoom` is called with it, or with null for all.
 * @param {{title: string, about?: string, x: number[], xName: string, lines: Line[], isLog?: boolean, height?: number, from0?: boolean, zoom?: [number, number]|null, cursor?: number|null, onZoom?: ((zoom: [number, number]|null) => void)|null}} options
 */
export function chart(options) {
  const { title, about, x, xName, isLog = false, height = 220, from0 = false, zoom = null, cursor = null, onZoom = null } = options;
  const lines = withEdges(options.lines);
  const figure = el("figure", { class: lines.length > 8 ? "chart many" : "chart", tabindex: 0, "aria-label": inWords(title, options.lines, xName, x), "data-metric": title });
  const whole = zoom && onZoom ? el("button", { type: "button", class: "whole", onclick: () => onZoom(null) }, "whole run") : null;
  figure.append(el("figcaption", {}, el("strong", {}, title), about ? el("span", { class: "about" }, ` ${about}`) : null, whole));
  const place = el("div", { class: "plot" });
  figure.append(place);
  const grid = { stroke: colour("grid"), width: 1 };
  const axis = { stroke: colour("muted"), grid, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const series = [
    { label: xName, value: told },
    ...lines.map((line, i) => serie(line, i, x.length)),
  ];
  const bands = lines.flatMap((line, i) => (line.kind === "edge" && lines[i - 1].kind === "edge" ? [{ series: [i + 1, i], fill: `${colour(line.colour ?? "c1")}33` }] : []));
  const range = (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => spread(low, high, from0);
  const plot = new uPlot(
    {
      width: 400, height, series, bands,
      cursor: { points: { size: 7 }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false, ...(zoom ? { range: () => zoom } : {}) }, y: isLog ? { distr: 3 } : { range } },
      axes: [
        { ...axis, size: 34, ...(xName === "step" ? { incrs: WHOLE } : {}), label: xName, labelSize: 18, labelFont: "12px system-ui, sans-serif" },
        { ...axis, size: 58, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((v) => (v === null ? "" : number(v))) },
      ],
      hooks: {
        setSelect: [(/** @type {any} */ made) => {
          if (made.select.width > 3 && onZoom) onZoom([made.posToVal(made.select.left, "x"), made.posToVal(made.select.left + made.select.width, "x")]);
        }],
      },
    },
    [x, ...lines.map((line) => (isLog ? line.values.map((v) => (v !== null && v > 0 ? v : null)) : line.values))],
    place,
  );
  drawn.add(plot);
  const fit = () => {
    const width = Math.floor(place.clientWidth);
    if (width > 0 && width !== plot.width) plot.setSize({ width, height });
  };
  const sizes = new ResizeObserver(fit);
  sizes.observe(place);
  figure.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (!closer(plot, event, onZoom)) moveCursor(plot, event);
  });
  if (onZoom) plot.over.addEventListener("dblclick", () => onZoom(null));
  figure.addEventListener("focus", () => {
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) setCursor(plot, cursor ?? lastShown(plot));
  });
  if (cursor !== null) requestAnimationFrame(() => requestAnimationFrame(() => { if (drawn.has(plot)) setCursor(plot, Math.min(cursor, x.length - 1)); }));
  /** @type {any} */ (figure).cursor = () => plot.cursor.idx ?? null;
  /** @type {any} */ (figure).close = () => {
    sizes.disconnect();
    drawn.delete(plot);
    plot.destroy();
  };
  return figure;
}

/** Lines, each followed by its lowest and highest values where it has them. @param {Line[]} lines @returns {Line[]} */
function withEdges(lines) {
  return lines.flatMap((line, i) => {
    if (!line.low || !line.high) return [line];
    const shade = line.colour ?? PALETTE[i % PALETTE.length];
    const edge = (/** @type {string} */ word, /** @type {Column} */ values) => ({ label: `${line.label}, ${word}`, values, kind: /** @type {const} */ ("edge"), colour: shade });
    return [line, edge("lowest", line.low), edge("highest", line.high)];
  });
}

/** Zooms with + and -, and shows all with 0; returns whether the key was one of these. @param {any} plot @param {KeyboardEvent} event @param {((zoom: [number, number]|null) => void)|null} onZoom */
function closer(plot, event, onZoom) {
  if (!onZoom || !["+", "=", "-", "0"].includes(event.key)) return false;
  event.preventDefault();
  event.stopPropagation();
  const { min, max } = plot.scales.x, at = plot.cursor.idx === null || plot.cursor.idx === undefined ? (min + max) / 2 : plot.data[0][plot.cursor.idx];
  const span = (max - min) * (event.key === "-" ? 2 : 0.5), whole = plot.data[0][plot.data[0].length - 1] - plot.data[0][0];
  const low = Math.min(Math.max(at - span / 2, min - span), max + span);
  onZoom(event.key === "0" || (event.key === "-" && span >= whole) ? null : [low, low + span]);
  return true;
}

/** What a legend tells: the value at the cursor; the newest while the cursor is elsewhere. @param {any} plot @param {number|null} value @param {number} line @param {number|null|undefined} at */
function told(plot, value, line, at) {
  if (at !== null && at !== undefined) return number(value);
  const values = plot.data[line];
  for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return number(values[i]);
  return "–";
}

/** @param {Line} line @param {number} i @param {number} count */
function serie(line, i, count) {
  const name = line.colour ?? PALETTE[i % PALETTE.length];
  const stroke = colour(name);
  const common = {
    label: line.label, stroke, spanGaps: true,
    value: told,
    points: { show: count < 40, size: 5 },
  };
  if (line.kind === "edge") return { ...common, class: "edge", width: 0, points: { show: false } };
  if (line.dash) return { ...common, width: 1.5, dash: line.dash };
  if (line.kind === "points") return { ...common, width: 1.5, dash: [4, 3], points: { show: true, size: 8, fill: stroke } };
  if (line.kind === "faint") return { ...common, width: 1, alpha: 0.4 };
  if (line.kind === "band") return { ...common, width: 0.5, alpha: 0.8, dash: [2, 3], points: { show: false } };
  if (line.kind === "area") return { ...common, width: 1, fill: stroke, points: { show: false } };
  return { ...common, width: 2 };
}

/** Range of an axis; nearly equal values get a wide one, so that they look constant. */
function spread(/** @type {number|null} */ low, /** @type {number|null} */ high, /** @type {boolean} */ from0) {
  if (low === null || high === null) return [0, 1];
  if (from0) low = Math.min(0, low);
  if (high === low) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const span = high - low;
  return [low === 0 ? 0 : low - 0.06 * span, high + 0.06 * span];
}

/** @param {any} plot @param {KeyboardEvent} event */
function moveCursor(plot, event) {
  const x = plot.data[0], { min } = plot.scales.x;
  const first = Math.max(0, x.findIndex((/** @type {number} */ v) => v >= min));
  const last = lastShown(plot);
  const now = plot.cursor.idx ?? last;
  const far = Math.max(1, Math.round((last - first) / 10));
  const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - far, PageDown: now + far, Home: first, End: last };
  if (!(event.key in moves)) return;
  event.preventDefault();
  const wanted = /** @type {any} */ (moves)[event.key];
  setCursor(plot, Math.min(last, Math.max(first, wanted)));
}

/** Index of the last point that is within the chart. @param {any} plot */
function lastShown(plot) {
  const x = plot.data[0];
  let last = x.length - 1;
  while (last > 0 && x[last] > plot.scales.x.max) last -= 1;
  return last;
}

function setCursor(/** @type {any} */ plot, /** @type {number} */ index) {
  plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.bbox.height / devicePixelRatio / 2 });
}

/** @param {string} title @param {Line[]} lines @param {string} xName @param {number[]} x */
function inWords(title, lines, xName, x) {
  const parts = lines.map((line) => {
    const known = line.values.filter((v) => v !== null && v !== undefined);
    return known.length ? `${line.label} from ${number(known[0])} to ${number(known[known.length - 1])}` : "";
  });
  return `${title} over ${xName} ${number(x[0])} to ${number(x[x.length - 1])}: ${parts.filter(Boolean).join("; ")}`;
}

/** Ends all charts inside `place`. */
export function closeCharts(/** @type {HTMLElement} */ place) {
  for (const figure of place.querySelectorAll("figure.chart")) /** @type {any} */ (figure).close?.();
}
