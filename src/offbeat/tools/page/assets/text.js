/** Elements, numbers and untrusted text. Text becomes part of the page as text nodes alone, never as HTML. */

/**
 * Characters that are invisible, or that change how their neighbours are shown: C0 and C1 controls but tab and newline,
 * bidirectional controls, zero-width characters, other line separators, tags, and halves of surrogate pairs.
 */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e007f}\ud800-\udfff]/gu;

/** Longest text, in characters, that is shown before the reader asks for all of it. */
export const SHOWN_CHARACTERS = 20000;

/**
 * Adds untrusted `text` to `parent`; each hidden character is shown as its number in a box.
 * @param {HTMLElement} parent
 * @param {string} text
 */
export function addText(parent, text) {
  let done = 0;
  for (const found of text.matchAll(HIDDEN)) {
    const at = found.index ?? 0;
    if (at > done) parent.append(text.slice(done, at));
    const code = (found[0].codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(2, "0");
    parent.append(el("span", { class: "escape", title: `character U+${code.padStart(4, "0")}` }, `\\u{${code}}`));
    done = at + found[0].length;
  }
  if (done < text.length) parent.append(text.slice(done));
}

/**
 * Returns `text` on one line of at most `limit` characters, with hidden characters escaped.
 * @param {string} text
 * @param {number} limit
 */
export function oneLine(text, limit = 300) {
  const start = text.length > 4 * limit ? text.slice(0, 4 * limit) : text;
  const plain = start.replace(/\s+/g, " ").replace(HIDDEN, (c) => `\\u{${(c.codePointAt(0) ?? 0).toString(16)}}`);
  return plain.length > limit || start.length < text.length ? `${plain.slice(0, limit)} …` : plain;
}

/**
 * Makes an element. Children that are strings become text.
 * @param {string} tag
 * @param {Record<string, any>} attributes keys that begin with "on" are listeners; null leaves one out
 * @param {...(Node|string|number|null|undefined)} children
 * @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) made.append(String(child) === child ? child : child instanceof Node ? child : String(child));
  return made;
}

/**
 * A block of untrusted text, cut after `SHOWN_CHARACTERS` until the reader asks for the rest.
 * @param {string} text
 * @param {string} kind class of the block
 */
export function textBlock(text, kind = "") {
  const block = el("pre", { class: `text ${kind}`, tabindex: 0 });
  if (!text) {
    block.append(el("em", {}, "empty"));
    return block;
  }
  addText(block, text.slice(0, SHOWN_CHARACTERS));
  if (text.length > SHOWN_CHARACTERS) {
    const more = el("button", { type: "button" }, `show all ${integer(text.length)} characters`);
    more.addEventListener("click", () => {
      more.remove();
      addText(block, text.slice(SHOWN_CHARACTERS));
    });
    block.append(more);
  }
  return block;
}

/** @param {number|null|undefined} value */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return integer(value);
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** @param {number} value */
export function integer(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** @param {number|null|undefined} value a share from 0 to 1 */
export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** @param {number|null|undefined} seconds wall time */
export function moment(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const date = new Date(seconds * 1000);
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/**
 * A table. Cells are text or nodes; columns named in `left` hold words.
 * @param {string[]} head
 * @param {(Node|string|number|null)[][]} rows
 * @param {string} caption
 */
export function table(head, rows, caption = "") {
  const body = rows.map((row) =>
    el("tr", {}, ...row.map((cell, i) => el("td", { "data-head": head[i], class: isFigure(cell) ? "figure" : null }, cell))),
  );
  const heads = head.map((name, i) => el("th", { scope: "col", class: rows.length && isFigure(rows[0][i]) ? "figure" : null }, name));
  const made = el("table", {}, caption ? el("caption", {}, caption) : null, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
  return el("div", { class: "scroll" }, made);
}

/** @param {Node|string|number|null} cell */
function isFigure(cell) {
  return typeof cell === "number" || (typeof cell === "string" && /^[-–0-9][0-9.,e%+ -]*$/.test(cell));
}

/** @param {...(Node|string)} words */
export function empty(...words) {
  return el("p", { class: "empty", role: "status" }, ...words);
}
