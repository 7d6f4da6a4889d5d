// The browser's storage: conversations are in IndexedDB, the look and the key in localStorage.

import { tell } from "./events.js";
import { chatOf } from "./tree.js";

const OLD = "infer.chat."; // conversations were in localStorage once
export const LOOK = "infer.theme", KEY = "infer.key";
const NOT_KEPT = "The browser has no room for this conversation, or keeps nothing for this page: it ends with this tab.";
const inMemory = new Map(); // where the browser keeps nothing

export function load(name) {
  try { return localStorage.getItem(name); } catch { return inMemory.get(name) ?? null; }
}

export function keep(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch { inMemory.set(name, value); }
}

const database = openDatabase();

/** A promise of the database; of null where the browser has none for this page. */
function openDatabase() {
  return new Promise((done) => {
    try {
      const asked = indexedDB.open("infer", 1);
      asked.onupgradeneeded = () => asked.result.createObjectStore("chats", { keyPath: "id" });
      asked.onsuccess = () => {
        asked.result.onversionchange = () => asked.result.close(); // a newer page has another version
        done(asked.result);
      };
      asked.onerror = () => done(null);
    } catch { done(null); }
  });
}

/** Do something with the store of conversations, and wait until that is done for good. Its result. */
async function withStore(mode, act) {
  const opened = await database;
  if (!opened) throw new Error("There is no database.");
  return new Promise((done, failed) => {
    const transaction = opened.transaction("chats", mode);
    const asked = act(transaction.objectStore("chats"));
    transaction.commit?.(); // now: a page that is left loses what is not on its way
    transaction.oncomplete = () => done(asked.result);
    transaction.onabort = transaction.onerror = () => failed(transaction.error);
  });
}

const tabs = "BroadcastChannel" in window ? new BroadcastChannel("infer") : null;

/** Call `act` with the id of each conversation that another tab has changed. */
export function onOtherTab(act) {
  tabs?.addEventListener("message", ({ data }) => act(data));
}

export async function saveChat(chat) {
  try {
    await withStore("readwrite", (store) => store.put(chat));
    tabs?.postMessage(chat.id);
  } catch { tell("notice", NOT_KEPT); }
}

export async function forgetChat(id) {
  try {
    await withStore("readwrite", (store) => store.delete(id));
    tabs?.postMessage(id);
  } catch { /* then it was not kept either */ }
}

/** A conversation as it was last saved; undefined if there is none. */
export const savedChat = (id) => withStore("readonly", (store) => store.get(id));

/** All conversations by their ids. Those that are still in localStorage move. */
export async function loadChats() {
  let saved = [];
  try { saved = await withStore("readonly", (store) => store.getAll()); } catch { /* nothing is kept */ }
  const found = new Map(saved.map((chat) => [chat.id, chat]));
  for (const [name, chat] of oldChats()) {
    if (!(found.get(chat.id)?.time >= chat.time)) found.set(chat.id, chat); // an old page may still write there
    try {
      await withStore("readwrite", (store) => store.put(found.get(chat.id)));
      localStorage.removeItem(name);
    } catch { /* they stay where they are */ }
  }
  return found;
}

/** Yields the conversations that localStorage still has, each with the name that it is under. */
function* oldChats() {
  let names = [];
  try { names = Object.keys(localStorage).filter((name) => name.startsWith(OLD)); } catch { /* it keeps nothing */ }
  for (const name of names) {
    let chat = null;
    try { chat = chatOf(JSON.parse(localStorage.getItem(name))); } catch { /* not one of ours */ }
    if (chat) yield [name, chat];
  }
}
