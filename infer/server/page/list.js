// The list of conversations.

import { app, chats, newChat, running } from "./chats.js";
import { $, button, el, icon } from "./dom.js";
import { on, tell } from "./events.js";
import { CHAT, keep, saveChat } from "./store.js";
import { show, showThread, showTitle } from "./thread.js";

export function showChats() {
  const sorted = [...chats.values()].sort((a, b) => b.time - a.time);
  $("chats").replaceChildren(...sorted.map((chat) => {
    const open = button(chat.title, "open", () => show(chat));
    open.title = chat.title;
    const item = el("li", {}, open);
    if (chat === app.here) { item.classList.add("here"); open.setAttribute("aria-current", "true"); }
    if (running.has(chat.id)) item.classList.add("busy");
    const rename = el("button", { type: "button", className: "icon", title: "Rename", "aria-label": `Rename ${chat.title}`, onclick: () => renamed(chat, item) }, icon("rename"));
    const remove = el("button", { type: "button", className: "icon", title: "Delete", "aria-label": `Delete ${chat.title}`, onclick: () => deleted(chat) }, icon("delete"));
    item.append(rename, remove);
    item.dataset.id = chat.id;
    return item;
  }));
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
  keep(CHAT + chat.id, null);
  if (chat === app.here) { app.here = newChat(); showThread(); tell("shown"); }
  else showChats();
  ($("chats").querySelector(".open") ?? $("new")).focus();
  notice(`“${chat.title}” was deleted.`, "Undo", () => {
    chats.set(chat.id, chat);
    saveChat(chat);
    show(chat);
  });
}

// The list, where there is no room for it beside them

function openMenu(opens) {
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
matchMedia("(max-width: 46rem)").addEventListener("change", closeMenu);

on("changed", showChats);
on("shown", () => { closeMenu(); showChats(); });
on("notice", notice);
