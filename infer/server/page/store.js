// What the browser keeps

import { tell } from "./events.js";
import { planted } from "./tree.js";

export const CHAT = "infer.chat.", LOOK = "infer.theme", KEY = "infer.key";
const inMemory = new Map(); // where the browser keeps nothing

export function load(name) {
  try { return localStorage.getItem(name); } catch { return inMemory.get(name) ?? null; }
}

export function keep(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch {
    inMemory.set(name, value);
    tell("notice", "The browser has no room for this conversation, or keeps nothing for this page: it ends with this tab.");
  }
}

/** A conversation: {id, title, named, time, model, settings, messages, tip}. */
export function parseChat(text) {
  try {
    const chat = JSON.parse(text);
    if (typeof chat.id === "string" && typeof chat.title === "string" && Array.isArray(chat.messages)) {
      chat.settings ??= {};
      return planted(chat);
    }
  } catch { /* not one of ours */ }
  return null;
}

export function loadChats() {
  const found = new Map();
  try {
    for (const name of Object.keys(localStorage)) {
      const chat = name.startsWith(CHAT) && parseChat(localStorage.getItem(name));
      if (chat) found.set(chat.id, chat);
    }
  } catch { /* it keeps nothing */ }
  return found;
}

export const saveChat = (chat) => keep(CHAT + chat.id, JSON.stringify(chat));
