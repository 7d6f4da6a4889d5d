// Code in colour, by Prism (vendor/prism.min.js): it takes a text apart, and here the parts become elements.

import { el } from "./dom.js";

// Other names of languages than those that Prism knows, or languages that are like them.
const LANGUAGES = {
  "c++": "cpp", hpp: "cpp", cuda: "cpp", h: "c", glsl: "c", "c#": "clike", csharp: "clike", cs: "clike", php: "clike",
  golang: "go", rs: "rust", jsx: "javascript", mjs: "javascript", tsx: "typescript", jsonc: "json", jsonl: "json",
  console: "bash", zsh: "bash", fish: "bash", python3: "python", patch: "diff", htm: "html", xhtml: "html", scss: "css",
  sqlite: "sql", postgresql: "sql", mysql: "sql",
};
// Prism takes long for some texts that are long, and longer for long lines. These are characters; a text is in colour up
// to so many. One that grows is shown again with each piece that comes.
const COLOURED = 12_000, COLOURED_GROWING = 4_000, COLOURED_LINE = 500;

/** Nodes of a piece of code. */
export function coloured(text, language, isGrowing) {
  const grammar = grammarOf(language.toLowerCase());
  const end = isGrowing ? COLOURED_GROWING : COLOURED;
  const begin = text.slice(0, end);
  if (!grammar || !text || begin.split("\n").some((line) => line.length > COLOURED_LINE)) return [text];
  return [...Prism.tokenize(begin, grammar).map(tokenNode), text.slice(end)];
}

/** Prism's grammar of a language; among its languages there are functions, too. */
function grammarOf(language) {
  const name = Object.hasOwn(LANGUAGES, language) ? LANGUAGES[language] : language;
  const found = Object.hasOwn(Prism.languages, name) && Prism.languages[name];
  return typeof found === "object" ? found : null;
}

/** The node of a token, which is a text, or has a type, other names of that, and tokens in it. */
function tokenNode(token) {
  if (typeof token === "string") return token;
  const names = [token.type, token.alias ?? []].flat();
  const node = el("span", { className: names.map((name) => `t-${name}`).join(" ") });
  node.append(...[token.content].flat().map(tokenNode));
  return node;
}
