// What is within a line of markdown: emphasis, code, links.

import { $, el } from "./dom.js";
import { mathNode } from "./maths.js";

export const DEPTH = 12; // of quotes, lists and emphasis in each other; deeper ones are text

const AUTOLINK = /<(?:([a-z][a-z0-9+.-]{1,31}:[^\x00-\x20<>]*)|([\w.!#$%&'*+/=?^`{|}~-]+@[a-z0-9-]+(?:\.[a-z0-9-]+)*))>/iy;
const BARE = /(?:https?:\/\/|mailto:)[^\s<>"`*]+/y;
const BREAK = /<br[ \t]*\/?>/iy;
const MATH = /\\\((?:[^\\]|\\[^)])*\\\)|\\\[(?:[^\\]|\\[^\]])*\\\]|\$\$[^$]+\$\$|\$(?![\s$])(?:[^$`\\\n]|\\[^\n])+(?<!\s)\$(?!\d)/y; // as Pandoc has $…$
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

/** Text nodes and elements of a text, by CommonMark's method: brackets and marks of emphasis stand among
    them until they are closed. */
export function inline(text) {
  const parts = [], brackets = [], none = new Set(); // backticks that nothing closes from here on
  let plain = "", i = 0;
  const flush = () => { if (plain) parts.push(plain); plain = ""; };
  const add = (...more) => { flush(); parts.push(...more); };
  const at = (pattern) => matchAt(pattern, text, i);
  while (i < text.length) {
    const c = text[i];
    let found, href, formula;
    if (c === "\n") {
      const ends = /(?: {2,}|\\)$/.test(plain);
      plain = plain.replace(/ +$|\\$/, "");
      if (ends) add(el("br"));
      else plain += "\n";
      i++;
    } else if ((c === "\\" || c === "$") && (found = at(MATH)) && (formula = formulaOf(found[0]))) {
      add(formula);
      i += found[0].length;
    } else if (c === "\\" && (found = at(ESCAPE))) {
      plain += found[1];
      i += 2;
    } else if (c === "&" && (found = at(ENTITY))) {
      plain += characterOf(found);
      i += found[0].length;
    } else if (c === "`") {
      const run = runOf(text, i);
      const end = none.has(run) ? -1 : closingRun(text, i + run.length, run);
      if (end < 0) { none.add(run); plain += run; i += run.length; }
      else {
        const code = text.slice(i + run.length, end).replaceAll("\n", " ");
        add(el("code", {}, /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code));
        i = end + run.length;
      }
    } else if (c === "<" && (found = at(BREAK))) {
      add(el("br"));
      i += found[0].length;
    } else if (c === "<" && (found = at(AUTOLINK)) && (href = safe(found[1] ?? `mailto:${found[2]}`))) {
      add(linkNode(href, [found[1] ?? found[2]]));
      i += found[0].length;
    } else if ((c === "h" || c === "m") && !WORD.test(text[i - 1] ?? " ") && (found = at(BARE))) {
      let address = brackets.length ? found[0].split("]", 1)[0] : found[0];
      address = address.replace(/(?:&[a-zA-Z\d]+;|[.,;:!?'_~\]])+$/, "");
      if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
      i += address.length;
      address = literal(address);
      add((href = safe(address)) ? linkNode(href, [address]) : address);
    } else if (c === "[" || (c === "!" && text[i + 1] === "[")) {
      flush();
      const bracket = c === "!" ? "![" : "[";
      brackets.push({ isImage: c === "!", at: parts.push(bracket), isOpen: true });
      i += bracket.length;
    } else if (c === "]" && brackets.length) {
      const { isImage, at: from, isOpen } = brackets.pop();
      const target = isOpen && targetAt(text, i + 1);
      if (!target) { plain += c; i++; continue; }
      flush();
      let inner = emphasised(parts.splice(from));
      parts.pop(); // the bracket
      if (!inner.length) inner = [target.address];
      // No link is in another, and an image is one to it, named by its text: nothing is fetched by showing
      // an answer.
      const whole = el("span", {}, ...inner);
      if (isImage) whole.replaceChildren(whole.textContent);
      else for (const within of whole.querySelectorAll("a")) within.replaceWith(...within.childNodes);
      if (!isImage) for (const bracket of brackets) bracket.isOpen &&= bracket.isImage;
      parts.push(...((href = safe(target.address)) ? [linkNode(href, whole.childNodes)] : whole.childNodes));
      i = target.end;
    } else if (c === "*" || c === "_" || c === "~") {
      const run = runOf(text, i);
      add(markOf(text, i, run));
      i += run.length;
    } else { plain += c; i++; }
  }
  flush();
  return emphasised(parts);
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
  // As CommonMark has it, but that a word of such a script ends without a space too: **“…”** in the middle.
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

export const written = (part) => (part.mark ? part.mark.repeat(part.left) : part);
