// The entry of the page: listens to other tabs, loads conversations and models, and shows the newest chat.

import { app, chats, running } from "./chats.js";
import { tell } from "./events.js";
import { showChats } from "./list.js";
import { toEnd } from "./scroll.js";
import { loadModels, watch } from "./server.js";
import { applyTheme } from "./settings.js";
import { LOOK, loadChats, onOtherTab, saveChat, savedChat } from "./store.js";
import { showThread } from "./thread.js";
import "./shortcuts.js";
import "./transfer.js";

// Other tabs

addEventListener("storage", ({ key }) => { if (key === LOOK) applyTheme(); });
onOtherTab(async (id) => {
  if (running.has(id)) return;
  const chat = await savedChat(id);
  if (chat) {
    chats.set(id, chat);
    if (app.here.id === id) { app.here = chat; showThread(); }
  } else if (app.here.id !== id) chats.delete(id);
  showChats();
});
addEventListener("pagehide", () => {
  for (const id of running.keys()) if (chats.has(id)) saveChat(chats.get(id));
});
addEventListener("pageshow", ({ persisted }) => { if (persisted) location.reload(); });

async function start() {
  applyTheme();
  for (const [id, chat] of await loadChats()) chats.set(id, chat);
  const newest = [...chats.values()].reduce((a, b) => (a && a.time > b.time ? a : b), null);
  if (newest && !app.here.messages.length) app.here = newest;
  showThread();
  tell("shown");
  toEnd();
  loadModels();
  watch(true);
}

start();
