// Markdown within a block: emphasis, code, links and formulas become DOM nodes.

import { $, el } from "./dom.js";
import { mathNode } from "./maths.js";

export const DEPTH = 12; // of quotes, lists and emphasis in each other; deeper ones are text

const AUTOLINK = /<(?:([a-z][a-z0-9+.-]{1,31}:[^\x00-\x20<>]*)|([\w.!#$%&'*+/=?^`{|}~-]+@[a-z0-9-]+(?:\.[a-z0-9-]+)*))>/iy;
const BARE = /(?:https?:\/\/|mailto:)[^\s<>"`*]+/y;
const BREAK = /<br[ \t]*\/?>/iy;
const MATH = new RegExp([
  /\\\((?:[^\\]|\\[^)])*\\\)/, // \(…\)
  /\\\[(?:[^\\]|\\[^\]])*\\\]/, // \[…\]
  /\$\$[^$]+\$\$/,
  /\$(?![\s$])(?:[^$`\\\n]|\\[^\n])+(?<!\s)\$(?!\d)/, // $…$, as Pandoc has it
].map(({ source }) => source).join("|"), "y");
const MONEY = /^[\d.,]+\s[^\\^_=]*$/; // between two amounts of dollars
const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([a-zA-Z][a-zA-Z\d]*));/y;
const ANGLED = /<((?:[^<>\\\n]|\\.)*)>/y;
const TITLE = /(?:\s+(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\((?:[^()\\]|\\.)*\)))?\s*\)/sy;
const WORD = /[\p{L}\p{N}]/u;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u; // no space ends a word

const matchAt = (pattern, text, i) => { pattern.lastIndex = i; return pattern.exec(text); };

const NAMES = new Map(Object.entries(JSON.parse($("entities").textContent)));

/** The character that a match of ENTITY stands for; what names none stays. */
function characterOf([, decimal, hex, name]) {
  if (name) return NAMES.get(name) ?? `&${name};`;
  const code = hex ? parseInt(hex, 16) : Number(decimal);
  const isCharacter = code && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
  return isCharacter ? String.fromCodePoint(code) : "\ufffd";
}

/** A text that is no markdown, but for its escapes and entities. */
export function literal(text) {
  return text.replace(new RegExp(`${ESCAPE.source}|${ENTITY.source}`, "g"), (_, escaped, ...entity) =>
    escaped ?? characterOf([, ...entity]));
}

/** The address of a link that opens elsewhere; null for one that is not safe to open. */
function safe(address) {
  let url;
  try { url = new URL(address.replaceAll("\\", "%5C")); } catch { return null; }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

const linkNode = (href, children) =>
  el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);

/** The address of a link, and where its "(address "title")" ends, which begins at i; null for none. */
function targetAt(text, i) {
  if (text[i] !== "(") return null;
  i++;
  while (/\s/.test(text[i] ?? "")) i++;
  const from = i;
  let address;
  const angled = matchAt(ANGLED, text, i);
  if (angled) {
    address = angled[1];
    i += angled[0].length;
  } else {
    let open = 0;
    for (; i < text.length && text[i] > " " && open <= 32; i++) {
      if (text[i] === "\\" && matchAt(ESCAPE, text, i)) i++;
      else if (text[i] === "(") open++;
      else if (text[i] === ")" && --open < 0) break;
    }
    if (open > 0 || text[from] === "<") return null;
    address = text.slice(from, i);
  }
  const end = matchAt(TITLE, text, i);
  return end && { address: literal(address), end: i + end[0].length };
}

/** Text nodes and elements of a text. */
export const inline = (text) => new InlineReader(text).read();

/** Reads a text by CommonMark's method: brackets and marks of emphasis stand among what was read until they are
    closed. Each method reads one thing that begins where the reader is, and tells whether it did. */
class InlineReader {
  constructor(text) {
    this.text = text;
    this.i = 0; // up to here it was read
    this.plain = ""; // what was read last, and is nothing but text
    this.parts = []; // strings, elements, marks of emphasis
    this.brackets = []; // that are open
    this.unclosed = new Set(); // runs of backticks that nothing closes from here on
  }

  read() {
    while (this.i < this.text.length) {
      const methods = METHODS[this.text[this.i]] ?? [];
      if (!methods.some((method) => this[method]())) this.take(this.text[this.i]);
    }
    this.flush();
    return emphasised(this.parts);
  }

  at(pattern) { return matchAt(pattern, this.text, this.i); }

  /** Go on behind what was read, which stands for itself or for another text. */
  take(read, plain = read) {
    this.plain += plain;
    this.i += read.length;
    return true;
  }

  /** Go on behind what was read, of which a part was made. */
  add(read, part) {
    this.flush();
    this.parts.push(part);
    this.i += read.length;
    return true;
  }

  flush() {
    if (this.plain) this.parts.push(this.plain);
    this.plain = "";
  }

  lineEnd() {
    const breaks = /(?: {2,}|\\)$/.test(this.plain);
    this.plain = this.plain.replace(/ +$|\\$/, "");
    return breaks ? this.add("\n", el("br")) : this.take("\n");
  }

  formula() {
    const found = this.at(MATH);
    const node = found && formulaOf(found[0]);
    return Boolean(node) && this.add(found[0], node);
  }

  escape() {
    const found = this.at(ESCAPE);
    return Boolean(found) && this.take(found[0], found[1]);
  }

  entity() {
    const found = this.at(ENTITY);
    return Boolean(found) && this.take(found[0], characterOf(found));
  }

  code() {
    const { text, i } = this, run = runOf(text, i);
    const end = this.unclosed.has(run) ? -1 : closingRun(text, i + run.length, run);
    if (end < 0) {
      this.unclosed.add(run);
      return this.take(run);
    }
    const code = text.slice(i + run.length, end).replaceAll("\n", " ");
    const node = el("code", {}, /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code);
    return this.add(text.slice(i, end + run.length), node);
  }

  lineBreak() {
    const found = this.at(BREAK);
    return Boolean(found) && this.add(found[0], el("br"));
  }

  autolink() {
    const found = this.at(AUTOLINK);
    const href = found && safe(found[1] ?? `mailto:${found[2]}`);
    return Boolean(href) && this.add(found[0], linkNode(href, [found[1] ?? found[2]]));
  }

  bareLink() {
    const found = WORD.test(this.text[this.i - 1] ?? " ") ? null : this.at(BARE);
    if (!found) return false;
    let read = this.brackets.length ? found[0].split("]", 1)[0] : found[0];
    read = read.replace(/(?:&[a-zA-Z\d]+;|[.,;:!?'_~\]])+$/, "");
    if (read.endsWith(")") && !read.includes("(")) read = read.slice(0, -1);
    const address = literal(read), href = safe(address);
    return this.add(read, href ? linkNode(href, [address]) : address);
  }

  openBracket() {
    const isImage = this.text.startsWith("![", this.i);
    if (!isImage && this.text[this.i] !== "[") return false;
    const bracket = isImage ? "![" : "[";
    this.add(bracket, bracket);
    this.brackets.push({ isImage, at: this.parts.length, isOpen: true });
    return true;
  }

  closeBracket() {
    if (!this.brackets.length) return false;
    const { isImage, at, isOpen } = this.brackets.pop();
    const target = isOpen && targetAt(this.text, this.i + 1);
    if (!target) return false;
    this.flush();
    const inner = emphasised(this.parts.splice(at));
    this.parts.pop(); // the bracket
    this.parts.push(...linked(target.address, inner.length ? inner : [target.address], isImage));
    // No link is in another.
    if (!isImage) for (const bracket of this.brackets) bracket.isOpen &&= bracket.isImage;
    this.i = target.end;
    return true;
  }

  emphasis() {
    const run = runOf(this.text, this.i);
    return this.add(run, markOf(this.text, this.i, run));
  }
}

// The methods of InlineReader that are tried at a character, in this order
const METHODS = {
  "\n": ["lineEnd"],
  "\\": ["formula", "escape"],
  $: ["formula"],
  "&": ["entity"],
  "`": ["code"],
  "<": ["lineBreak", "autolink"],
  h: ["bareLink"],
  m: ["bareLink"],
  "[": ["openBracket"],
  "!": ["openBracket"],
  "]": ["closeBracket"],
  "*": ["emphasis"],
  _: ["emphasis"],
  "~": ["emphasis"],
};

/** A link with what is in it, without links in that; those nodes alone if its address is not safe. An image is a
    link to it, named by its text: nothing is fetched by showing an answer. */
function linked(address, inner, isImage) {
  const whole = el("span", {}, ...inner);
  if (isImage) whole.replaceChildren(whole.textContent);
  else for (const within of whole.querySelectorAll("a")) within.replaceWith(...within.childNodes);
  const href = safe(address);
  return href ? [linkNode(href, whole.childNodes)] : whole.childNodes;
}

/** An element with a formula and its marks, as it was written where it cannot be read; null where $…$ is
    none. */
function formulaOf(text) {
  const size = text.startsWith("$") && !text.startsWith("$$") ? 1 : 2;
  const tex = text.slice(size, -size);
  if (size === 1 && MONEY.test(tex)) return null;
  return mathNode(tex, size === 2 && !text.startsWith("\\(")) ??
    (size === 1 ? null : el("span", { className: "math source" }, text));
}

function runOf(text, i) {
  let end = i;
  while (text[end] === text[i]) end++;
  return text.slice(i, end);
}

/** Where a run of just these backticks is, from i on; -1 for nowhere. */
function closingRun(text, i, run) {
  for (let at = text.indexOf(run, i); at >= 0; ) {
    const found = runOf(text, at);
    if (found.length === run.length) return at;
    at = text.indexOf(run, at + found.length);
  }
  return -1;
}

/** A run at i of a mark of emphasis, and whether it may open or close; a text where it may not. */
function markOf(text, i, run) {
  const before = [...text.slice(Math.max(0, i - 2), i)].at(-1) ?? " ";
  const after = String.fromCodePoint(text.codePointAt(i + run.length) ?? 32);
  const ends = (side) => /\s/.test(side) || PUNCTUATION.test(side);
  // CommonMark's rule, except that a word of an unspaced script ends without a space too: **“…”** in the middle.
  const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || ends(before) || UNSPACED.test(before));
  const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || ends(after) || UNSPACED.test(after));
  const isWithin = left && right && run[0] === "_";
  const opens = left && (!isWithin || PUNCTUATION.test(before));
  const closes = right && (!isWithin || PUNCTUATION.test(after));
  if ((!opens && !closes) || (run[0] === "~" && run.length !== 2)) return run;
  return { mark: run[0], length: run.length, left: run.length, opens, closes };
}

/** Strings and elements, of which those between marks that belong together are in an element. */
function emphasised(parts) {
  const openers = [], lowest = {}; // by kind of closer, below which opener there is none for it
  const depths = new Map(); // of elements
  const fits = (opener, closer) => opener.mark === closer.mark &&
    (opener.mark === "~" || !(opener.closes || closer.opens) || (opener.length + closer.length) % 3 !== 0 ||
      (opener.length % 3 === 0 && closer.length % 3 === 0));
  for (const closer of parts.filter(({ mark }) => mark)) {
    while (closer.closes && closer.left) {
      const kind = closer.mark + closer.opens + (closer.length % 3);
      let k = openers.length - 1;
      while (k >= (lowest[kind] ?? 0) && !fits(openers[k], closer)) k--;
      if (k < (lowest[kind] ?? 0)) { lowest[kind] = openers.length; break; }
      const opener = openers[k];
      openers.length = k + 1;
      for (const each in lowest) lowest[each] = Math.min(lowest[each], k + 1);
      const from = parts.indexOf(opener) + 1, to = parts.indexOf(closer);
      const depth = parts.slice(from, to).reduce((most, part) => Math.max(most, depths.get(part) ?? 0), 0) + 1;
      if (depth > DEPTH) break;
      const size = Math.min(2, opener.left, closer.left);
      const tag = opener.mark === "~" ? "del" : size === 2 ? "strong" : "em";
      const node = el(tag, {}, ...parts.slice(from, to).map(written));
      depths.set(node, depth);
      parts.splice(from, to - from, node);
      opener.left -= size;
      closer.left -= size;
      if (!opener.left) openers.pop();
    }
    if (closer.opens && closer.left) openers.push(closer);
  }
  return parts.map(written).filter(Boolean);
}

const written = (part) => (part.mark ? part.mark.repeat(part.left) : part);
