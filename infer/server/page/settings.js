// Settings

import { app } from "./chats.js";
import { $ } from "./dom.js";
import { on } from "./events.js";
import { loadModels } from "./server.js";
import { KEY, LOOK, keep, load, saveChat } from "./store.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const fields = $("settings-form").elements;

function openSettings() {
  fields.system.value = app.here.settings.system ?? "";
  for (const name of NUMBERS) fields[name].value = app.here.settings[name] ?? "";
  $("key").value = load(KEY) ?? "";
  $("key-field").hidden &&= !load(KEY);
  if (!$("settings").open) $("settings").showModal();
}

function askForKey(why) {
  $("key-note").textContent = why;
  $("key-note").hidden = $("key-field").hidden = false;
  openSettings();
  $("key").focus();
}

$("open-settings").addEventListener("click", openSettings);
$("close-settings").addEventListener("click", () => $("settings").close());
$("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
$("settings-form").addEventListener("submit", (event) => { event.preventDefault(); $("settings").close(); });
$("settings-form").addEventListener("input", () => {
  const settings = { system: fields.system.value.trim() || undefined };
  for (const name of NUMBERS) {
    const field = fields[name];
    const good = field.value && field.checkValidity();
    settings[name] = good ? field.valueAsNumber : field.value || field.validity.badInput ? app.here.settings[name] : undefined;
  }
  app.here.settings = settings;
  if (app.here.messages.length) saveChat(app.here);
});
$("settings").addEventListener("close", () => {
  const key = $("key").value.trim();
  const isNew = key !== (load(KEY) ?? "");
  if (isNew) keep(KEY, key || null);
  $("key-note").hidden = true;
  $("transferred").textContent = "";
  if (isNew) loadModels();
  $("text").focus();
});

on("key", askForKey);

export function applyTheme() {
  const theme = load(LOOK) ?? "";
  document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
}
$("theme").addEventListener("change", () => { keep(LOOK, $("theme").value || null); applyTheme(); });
