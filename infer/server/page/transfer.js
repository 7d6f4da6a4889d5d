// Conversations as a file, to be kept elsewhere or to go on in another browser.

import { app, chats, running } from "./chats.js";
import { $, download } from "./dom.js";
import { tell } from "./events.js";
import { number } from "./format.js";
import { saveChat } from "./store.js";
import { show } from "./thread.js";
import { chatOf } from "./tree.js";

const FORMAT = "infer conversations";

function exportChats() {
  const date = new Date().toISOString();
  const whole = { format: FORMAT, version: 1, date, chats: [...chats.values()] };
  download(`conversations-${date.slice(0, 10)}.json`, JSON.stringify(whole, null, 1));
}

/** Add what a file has. A conversation that is here already, and is not older, stays. */
async function importChats(file) {
  const given = await chatsIn(file);
  if (!given) return `“${file.name}” is no file of conversations that this page has written.`;
  let count = 0;
  for (const chat of given) {
    if (running.has(chat.id) || chats.get(chat.id)?.time >= chat.time) continue;
    chats.set(chat.id, chat);
    await saveChat(chat);
    if (chat.id === app.here.id) show(chat);
    count++;
  }
  tell("listed");
  const left = given.length - count;
  return `Imported: ${number.format(count)}.${left ? ` Here already: ${number.format(left)}.` : ""}`;
}

/** The conversations of a file; null if it is none of ours. */
async function chatsIn(file) {
  try {
    const { format, version, chats: given } = JSON.parse(await file.text());
    if (format !== FORMAT || version !== 1) return null;
    const read = given.map(chatOf);
    return read.includes(null) ? null : read;
  } catch { return null; }
}

$("export").addEventListener("click", exportChats);
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  const [file] = $("import-file").files;
  $("import-file").value = ""; // or the same file could not be chosen again
  if (file) $("transferred").textContent = await importChats(file);
});
