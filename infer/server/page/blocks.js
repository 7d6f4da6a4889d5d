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

/** The blocks of some lines: {kind, from, to} and what each kind has. */
export function* blocks(lines, depth) {
  let i = 0;
  while (i < lines.length) {
    const line = lines[i], from = i;
    let found, block;
    if (!line.trim()) { i++; continue; }
    if ((found = FENCE.exec(line))) {
      const [, space, fence, language] = found;
      const end = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
      const text = [];
      for (i++; i < lines.length && !end.test(lines[i]); i++)
        text.push(lines[i].slice(Math.min(indent(lines[i]), space.length)));
      const isOpen = i === lines.length;
      if (isOpen && !text.at(-1)) text.pop(); // its line end came, and no more
      i++;
      block = { kind: "code", language: literal(language), text: text.join("\n"), isOpen };
    } else if ((found = HEADING.exec(line))) {
      i++;
      block = { kind: "heading", level: found[1].length, text: found[2].trim().replace(/ #+$/, "") };
    } else if (RULE.test(line)) {
      i++;
      block = { kind: "rule" };
    } else if (depth < DEPTH && QUOTE.test(line)) {
      const inner = [];
      for (; i < lines.length && QUOTE.test(lines[i]); i++) inner.push(lines[i].replace(QUOTE, ""));
      block = { kind: "quote", lines: inner };
    } else if (depth < DEPTH && ITEM.test(line)) {
      const items = [];
      let loose = false;
      const ordered = /\d/.test(ITEM.exec(line)[2]);
      while (i < lines.length && (found = ITEM.exec(lines[i])) && /\d/.test(found[2]) === ordered && !RULE.test(lines[i])) {
        const [head, space, mark] = found;
        const own = [lines[i].slice(head.length)];
        for (i++; i < lines.length; i++) {
          const next = lines[i];
          if (!next.trim()) {
            // A blank line is within the item if what follows is.
            let after = i;
            while (after < lines.length && !lines[after].trim()) after++;
            if (after === lines.length || indent(lines[after]) < space.length + 2) break;
            loose = true;
            own.push("");
          } else if (indent(next) >= space.length + 2 || (!begins(next) && lines[i - 1].trim())) {
            own.push(next.slice(Math.min(indent(next), head.length)));
          } else break;
        }
        items.push({ number: parseInt(mark), lines: own });
        // Blank lines between items of one list.
        let after = i;
        while (after < lines.length && !lines[after].trim()) after++;
        found = after > i && after < lines.length && ITEM.exec(lines[after]);
        if (found && /\d/.test(found[2]) === ordered && indent(lines[after]) < space.length + 2) {
          loose = true;
          i = after;
        }
      }
      block = { kind: "list", ordered, items, loose };
    } else if (isTable(lines, i)) {
      const rows = [];
      const align = cells(lines[i + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
      for (rows.push(cells(line)), i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(cells(lines[i]));
      block = { kind: "table", rows, align };
    } else if ((found = FORMULA.exec(line)) && endsWithLine(found)) {
      const end = ENDS[found[1]];
      for (let rest = found[2]; !rest.includes(end) && ++i < lines.length; ) rest = lines[i];
      i++;
      block = { kind: "math", ...formulaIn(lines.slice(from, i).join("\n").trim(), end) };
    } else {
      for (i++; i < lines.length && lines[i].trim() && !begins(lines[i]) && !isTable(lines, i); i++);
      block = { kind: "paragraph", text: lines.slice(from, i).map((each) => each.trimStart()).join("\n") };
    }
    yield { ...block, from, to: Math.min(i, lines.length) };
  }
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
