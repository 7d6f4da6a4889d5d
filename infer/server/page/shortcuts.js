// Keyboard shortcuts, which work wherever the focus is, and the list that shows them.

import { app, running } from "./chats.js";
import { newConversation, stopAnswer } from "./composer.js";
import { $, el } from "./dom.js";
import { closeMenu, openMenu } from "./list.js";
import { pathOf } from "./tree.js";

const isMac = /Mac|iP(?:hone|ad)/.test(navigator.platform);
const MAIN = isMac ? "⌘" : "Ctrl";
const SHORTCUTS = [
  ["New conversation", [MAIN, "Shift", "O"]],
  ["Search conversations", [MAIN, "K"]],
  ["Send", ["Enter"]],
  ["Begin a new line", ["Shift", "Enter"]],
  ["Edit the last message, where nothing is typed", ["↑"]],
  ["Stop the answer", ["Esc"]],
  ["Show this list", ["?"]],
];

/** The action of a key, besides that in the field that has the focus; null for none. */
function actionOf(event) {
  const { key, shiftKey, target } = event;
  const hasMain = (isMac ? event.metaKey : event.ctrlKey) && !event.altKey;
  if (key === "Escape") return escape;
  if (document.querySelector("dialog[open]")) return null;
  if (hasMain && shiftKey && key.toLowerCase() === "o") return newConversation;
  if (hasMain && !shiftKey && key.toLowerCase() === "k") return toSearch;
  if (key === "?" && !target.closest("input, textarea, select")) return showShortcuts;
  if (key === "ArrowUp" && target === $("text") && !target.value) return editLast;
  return null;
}

/** Each of these tells whether there was something to do. */
function escape() {
  if (document.querySelector("dialog[open]")) return false; // which the browser closes
  if (document.body.classList.contains("menu")) { closeMenu(); $("menu").focus(); }
  else if (running.has(app.here.id)) stopAnswer();
  else return false;
  return true;
}

function toSearch() {
  openMenu(true);
  $("search").select();
  $("search").focus();
  return true;
}

function editLast() {
  const last = pathOf(app.here).findLast(({ role }) => role === "user");
  if (!last || running.has(app.here.id)) return false;
  app.views.get(last).change();
  return true;
}

function showShortcuts() {
  $("shortcuts").showModal();
  return true;
}

$("shortcut-list").replaceChildren(...SHORTCUTS.flatMap(([what, keys]) =>
  [el("dt", {}, ...keys.map((key) => el("kbd", {}, key))), el("dd", {}, what)]));
$("open-shortcuts").addEventListener("click", showShortcuts);
$("shortcuts").addEventListener("click", (event) => {
  if (event.target === $("shortcuts") || event.target.closest("button")) $("shortcuts").close();
});
document.addEventListener("keydown", (event) => {
  if (!event.isComposing && actionOf(event)?.()) event.preventDefault();
});
