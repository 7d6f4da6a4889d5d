// The list of conversations.

import { app, chats, newChat, running } from "./chats.js";
import { $, button, el, icon } from "./dom.js";
import { on, tell } from "./events.js";
import { dayOf, timeOf } from "./format.js";
import { forgetChat, saveChat } from "./store.js";
import { show, showThread, showTitle } from "./thread.js";
import { pathOf, turnTo } from "./tree.js";

/** The conversations that are listed, by day; while something is searched for, those that have it. */
export function showChats() {
  const searched = $("search").value.trim().toLowerCase();
  const sorted = [...chats.values()].sort((a, b) => b.time - a.time);
  const found = sorted.map((chat) => searchIn(chat, searched)).filter(Boolean);
  $("chats").replaceChildren(...byDay(found).map(([day, those]) => el("section", {},
    el("h2", {}, day), el("ul", {}, ...those.map(itemNode)))));
  $("found").textContent = searched && !found.length ? "Nothing was found." : "";
}

/** Where a text is in a conversation: {chat, message, snippet}; the last two only where it is in a message and
    not in the title. Null if it is nowhere. */
function searchIn(chat, searched) {
  if (!searched || chat.title.toLowerCase().includes(searched)) return { chat };
  const message = chat.messages.findLast(({ content }) => content.toLowerCase().includes(searched));
  if (!message) return null;
  const at = message.content.toLowerCase().indexOf(searched), from = Math.max(0, at - 24);
  return { chat, message, snippet: (from ? "…" : "") + message.content.slice(from, at + 100) };
}

/** Conversations, sorted by time, in groups: pairs of a day's name and those of it. */
function byDay(found) {
  const groups = new Map();
  for (const each of found) {
    const day = dayOf(each.chat.time);
    if (!groups.has(day)) groups.set(day, []);
    groups.get(day).push(each);
  }
  return [...groups];
}

function itemNode({ chat, message, snippet }) {
  const act = (name, label, onclick) => el("button", { type: "button", className: "icon", title: label,
    "aria-label": `${label} ${chat.title}`, onclick }, icon(name));
  const open = el("button", { type: "button", className: "open", onclick: () => openAt(chat, message),
    title: `${chat.title}\n${timeOf(chat.time)}` }, chat.title);
  if (snippet) open.append(el("small", {}, snippet));
  const item = el("li", {}, open);
  item.append(act("rename", "Rename", () => renamed(chat, item)), act("delete", "Delete", () => deleted(chat)));
  item.dataset.id = chat.id;
  item.classList.toggle("busy", running.has(chat.id));
  if (chat === app.here) {
    item.classList.add("here");
    open.setAttribute("aria-current", "true");
  }
  return item;
}

/** Show a conversation; where a message was found, in a version that has it. */
function openAt(chat, message) {
  if (message && !running.has(chat.id) && !pathOf(chat).includes(message)) turnTo(chat, message);
  show(chat);
  if (message) app.views.get(message)?.node.scrollIntoView();
}

export function notice(text, label, action) {
  const node = $("notice");
  node.replaceChildren(text);
  if (label) node.append(button(label, "", () => { node.replaceChildren(); action(); }));
}

function renamed(chat, item) {
  const field = el("input", { value: chat.title, maxLength: 200, "aria-label": "Name of the conversation" });
  const old = [...item.children];
  let done = false;
  const end = (keepIt) => {
    if (done) return;
    done = true;
    const title = field.value.trim();
    if (keepIt && title && title !== chat.title) {
      Object.assign(chat, { title, named: true });
      saveChat(chat);
      if (chat === app.here) showTitle();
    }
    item.replaceChildren(...old);
    showChats();
    $("chats").querySelector(`[data-id="${CSS.escape(chat.id)}"] .open`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) {
      event.preventDefault(); // or it would press what gets the focus
      end(true);
    }
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
  field.addEventListener("blur", () => end(true));
  item.replaceChildren(field);
  field.select();
  field.focus();
}

function deleted(chat) {
  running.get(chat.id)?.stop.abort();
  chats.delete(chat.id);
  forgetChat(chat.id);
  if (chat === app.here) { app.here = newChat(app.here); showThread(); tell("shown"); }
  else showChats();
  ($("chats").querySelector(".open") ?? $("new")).focus();
  notice(`“${chat.title}” was deleted.`, "Undo", () => {
    chats.set(chat.id, chat);
    saveChat(chat);
    show(chat);
  });
}

// The list, where there is no room for it beside the conversation

const isNarrow = matchMedia("(max-width: 46rem)");

/** Show the list over the conversation, if it has no room beside it; or hide it. */
export function openMenu(opens) {
  if (opens && !isNarrow.matches) return;
  document.body.classList.toggle("menu", opens);
  $("menu").setAttribute("aria-expanded", String(opens));
  document.querySelector("main").inert = opens;
  if (opens) $("new").focus();
}
export function closeMenu() {
  if (document.body.classList.contains("menu")) openMenu(false);
}
$("menu").addEventListener("click", () => openMenu(true));
$("shade").addEventListener("click", closeMenu);
isNarrow.addEventListener("change", closeMenu);

on("changed", showChats);
on("listed", showChats);
on("shown", () => { closeMenu(); showChats(); });
on("notice", notice);

$("search").addEventListener("input", showChats);
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.isComposing) $("chats").querySelector(".open")?.click();
});
