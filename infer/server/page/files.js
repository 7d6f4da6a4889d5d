// Text files that belong to a message: {name, text}.

import { number } from "./format.js";

const LARGEST = 1_000_000; // bytes

/** The text of a message as a model gets it: its files, each fenced as code, and then what was written. */
export const textOf = ({ content, files = [] }) => [...files.map(fencedFile), content].filter(Boolean).join("\n\n");

function fencedFile({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}\n${fence}`;
}

/** A file as it is kept. Throws Error with a message for the user where it is no text, or too large. */
export async function readFile(file) {
  const name = file.name.replace(/\s+/g, " ").slice(0, 200) || "Unnamed";
  if (file.size > LARGEST)
    throw new Error(`“${name}” has more than ${number.format(LARGEST / 1e6)} MB. Attach a part of it.`);
  const bytes = await file.arrayBuffer();
  let text = null;
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { /* no text in UTF-8 */ }
  if (text === null || text.includes("\0"))
    throw new Error(`“${name}” is no text file. Attach files of text in UTF-8.`);
  return { name, text: text.replaceAll("\r\n", "\n") };
}
