// Blocks of markdown: paragraphs, lists, code, tables.

import { coloured } from "./colours.js";
import { button, copied, el } from "./dom.js";
import { DEPTH, inline, literal } from "./inline.js";
import { mathNode } from "./maths.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const FORMULA = /^ {0,3}(\$\$|\\\[)(.*)$/;
const ENDS = { "$$": "$$", "\\[": "\\]" }; // of formulas, by what begins them
const AFTER = /^[\s.,;:]*$/; // a formula, as a part of it
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

const isTable = (lines, i) =>
  lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && DELIMITERS.test(lines[i + 1]);
const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line));
const indent = (line) => line.length - line.trimStart().length;

// Each of these reads the block of its kind that begins at a line: {kind, to, ...}, where `to` is the line after it.
// null: there is none.
const READERS = [codeAt, headingAt, ruleAt, quoteAt, listAt, tableAt, formulaAt];

/** The blocks of some lines: {kind, from, to} and what each kind has. */
export function* blocks(lines, depth) {
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) { i++; continue; }
    const read = READERS.reduce((found, reader) => found ?? reader(lines, i, depth), null) ?? paragraphAt(lines, i);
    yield { ...read, from: i };
    i = read.to;
  }
}

function codeAt(lines, from) {
  const found = FENCE.exec(lines[from]);
  if (!found) return null;
  const [, space, fence, language] = found;
  const end = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
  const text = [];
  let i = from + 1;
  for (; i < lines.length && !end.test(lines[i]); i++)
    text.push(lines[i].slice(Math.min(indent(lines[i]), space.length)));
  const isOpen = i === lines.length;
  if (isOpen && !text.at(-1)) text.pop(); // its line end came, and no more
  return { kind: "code", language: literal(language), text: text.join("\n"), isOpen, to: isOpen ? i : i + 1 };
}

function headingAt(lines, from) {
  const found = HEADING.exec(lines[from]);
  return found && { kind: "heading", level: found[1].length, text: found[2].trim().replace(/ #+$/, ""), to: from + 1 };
}

function ruleAt(lines, from) {
  return RULE.test(lines[from]) ? { kind: "rule", to: from + 1 } : null;
}

function quoteAt(lines, from, depth) {
  if (depth >= DEPTH || !QUOTE.test(lines[from])) return null;
  let to = from;
  while (to < lines.length && QUOTE.test(lines[to])) to++;
  return { kind: "quote", lines: lines.slice(from, to).map((line) => line.replace(QUOTE, "")), to };
}

function listAt(lines, from, depth) {
  const first = ITEM.exec(lines[from]);
  if (depth >= DEPTH || !first) return null;
  const ordered = isOrdered(first), items = [];
  let loose = false, to = from;
  for (let item; (item = itemAt(lines, to, ordered)); ) {
    items.push(item);
    loose ||= item.hasBlanks;
    to = item.to;
    const next = afterBlanks(lines, to);
    // Blank lines between items of one list.
    if (next > to && isNextItem(lines[next], ordered, item.space)) {
      loose = true;
      to = next;
    }
  }
  return { kind: "list", ordered, items, loose, to };
}

const isOrdered = ([, , mark]) => /\d/.test(mark);

/** The first line from i on that is not blank. */
function afterBlanks(lines, i) {
  while (i < lines.length && !lines[i].trim()) i++;
  return i;
}

function isNextItem(line, ordered, space) {
  const found = line !== undefined && ITEM.exec(line);
  return found && isOrdered(found) === ordered && indent(line) < space + 2;
}

/** The item of a list that begins at a line: {number, lines, hasBlanks, space, to}. space: before its mark. */
function itemAt(lines, from, ordered) {
  const found = from < lines.length && !RULE.test(lines[from]) && ITEM.exec(lines[from]);
  if (!found || isOrdered(found) !== ordered) return null;
  const [head, { length: space }, mark] = found;
  const own = [lines[from].slice(head.length)];
  let hasBlanks = false, i = from + 1;
  for (; i < lines.length; i++) {
    const line = lines[i];
    if (!line.trim()) {
      // A blank line is within the item if what follows is.
      const next = afterBlanks(lines, i);
      if (next === lines.length || indent(lines[next]) < space + 2) break;
      hasBlanks = true;
      own.push("");
    } else if (indent(line) >= space + 2 || (!begins(line) && lines[i - 1].trim())) {
      own.push(line.slice(Math.min(indent(line), head.length)));
    } else break;
  }
  return { number: parseInt(mark), lines: own, hasBlanks, space, to: i };
}

function tableAt(lines, from) {
  if (!isTable(lines, from)) return null;
  let to = from + 2;
  while (to < lines.length && lines[to].includes("|")) to++;
  const rows = [lines[from], ...lines.slice(from + 2, to)].map(cells);
  return { kind: "table", rows, align: cells(lines[from + 1]).map(alignment), to };
}

const alignment = (cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right");

function formulaAt(lines, from) {
  const found = FORMULA.exec(lines[from]);
  if (!found || !endsWithLine(found)) return null;
  const end = ENDS[found[1]];
  let to = from + 1;
  for (let rest = found[2]; !rest.includes(end) && to < lines.length; to++) rest = lines[to];
  return { kind: "math", ...formulaIn(lines.slice(from, to).join("\n").trim(), end), to };
}

/** Whether a formula that begins a line is all of it, or ends in a later one. */
function endsWithLine([, mark, rest]) {
  const end = rest.indexOf(ENDS[mark]);
  return end < 0 || AFTER.test(rest.slice(end + 2));
}

/** The TeX of a formula with its marks, and what stands behind them. No tex: it has not ended yet. */
function formulaIn(text, end) {
  const at = text.indexOf(end, 2);
  if (at < 0) return { text, tex: null, after: "" };
  const tex = text.slice(2, at), after = text.slice(at + 2).trim();
  return AFTER.test(after) ? { text, tex: tex + after, after: "" } : { text, tex, after };
}

function paragraphAt(lines, from) {
  let to = from + 1;
  while (to < lines.length && lines[to].trim() && !begins(lines[to]) && !isTable(lines, to)) to++;
  return { kind: "paragraph", text: lines.slice(from, to).map((each) => each.trimStart()).join("\n"), to };
}

/** The cells of a row of a table. */
function cells(row) {
  const found = row.trim().replace(/^\|/, "").match(/(?:[^|\\`]|\\.?|`[^`]*`|`)+|\|/g) ?? [];
  const texts = [""];
  for (const each of found) {
    if (each === "|") texts.push("");
    else texts[texts.length - 1] += each;
  }
  if (!texts.at(-1).trim()) texts.pop();
  return texts.map((text) => text.trim().replaceAll("\\|", "|"));
}

export function blockNode(block, depth) {
  switch (block.kind) {
    case "code": return codeNode(block);
    case "heading": return el(`h${block.level}`, {}, ...inline(block.text));
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, ...blockNodes(block.lines, depth + 1));
    case "math": return formulaNode(block);
    case "list": return listNode(block, depth);
    case "table": return tableNode(block);
    default: return el("p", {}, ...inline(block.text));
  }
}

function* blockNodes(lines, depth) {
  for (const block of blocks(lines, depth)) yield blockNode(block, depth);
}

/** A formula on lines of its own; as it was written until it has ended, and where it cannot be read. */
function formulaNode({ text, tex, after }) {
  const formula = tex === null ? null : mathNode(tex, true);
  if (!formula) return el("div", { className: "math source" }, text);
  const node = el("div", { className: "math", tabIndex: 0, role: "group", "aria-label": "Formula" }, formula);
  return after ? el("div", {}, node, el("p", {}, ...inline(after))) : node;
}

function codeNode({ language, text, isOpen }) {
  const code = el("code", {}, ...coloured(text, language, isOpen));
  const copy = button("Copy", "quiet", () => copied(copy, code.textContent));
  const label = language ? `Code, ${language}` : "Code";
  return el("figure", { className: "code" },
    el("figcaption", {}, el("span", {}, language || "Code"), copy),
    el("pre", { tabIndex: 0, role: "group", "aria-label": label }, code));
}

function listNode({ ordered, items, loose }, depth) {
  const list = el(ordered ? "ol" : "ul");
  if (ordered && items[0].number !== 1) list.start = items[0].number;
  for (const { lines } of items) {
    lines[0] = lines[0].replace(/^\[ \] /, "☐ ").replace(/^\[[xX]\] /, "☑ ");
    const parts = [...blocks(lines, depth + 1)].map((block) =>
      block.kind === "paragraph" && !loose ? inline(block.text) : [blockNode(block, depth + 1)]);
    list.append(el("li", {}, ...parts.flat()));
  }
  return list;
}

function tableNode({ rows: [head, ...rows], align }) {
  const row = (texts, kind) => el("tr", {}, ...head.map((_, i) => {
    const cell = el(kind, {}, ...inline(texts[i] ?? ""));
    if (kind === "th") cell.scope = "col";
    if (align[i]) cell.dataset.align = align[i];
    return cell;
  }));
  return el("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, ...rows.map((texts) => row(texts, "td")))));
}
