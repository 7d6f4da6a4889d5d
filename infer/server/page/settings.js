// Settings

import { NUMBERS } from "./answer.js";
import { app } from "./chats.js";
import { $ } from "./dom.js";
import { on } from "./events.js";
import { loadModels } from "./server.js";
import { KEY, LOOK, keep, load, saveChat } from "./store.js";

const TEXTS = ["system", "thinking", "stop", "schema", "other"];
const fields = $("settings-form").elements;

function openSettings() {
  for (const name of [...TEXTS, ...NUMBERS]) fields[name].value = app.here.settings[name] ?? "";
  showJsonErrors();
  $("more-settings").open = [...$("more-settings").querySelectorAll("[name]")].some(({ value }) => value);
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
  showJsonErrors();
  const settings = Object.fromEntries([...TEXTS, ...NUMBERS].map((name) => [name, settingOf(name)]));
  for (const [name, value] of Object.entries(settings)) if (value === undefined) delete settings[name];
  app.here.settings = settings;
  showWhetherSet();
  if (app.here.messages.length) saveChat(app.here);
});

/** The value of a field; as long as that is not valid, the value before. */
function settingOf(name) {
  const field = fields[name];
  if (!field.value.trim() && !field.validity.badInput) return undefined;
  if (!field.checkValidity()) return app.here.settings[name];
  return NUMBERS.includes(name) ? field.valueAsNumber : name === "stop" ? field.value : field.value.trim();
}

/** Mark the button where something is set: what a new conversation has from the last one is not in sight. */
function showWhetherSet() {
  const isSet = Object.keys(app.here.settings).length > 0;
  $("open-settings").classList.toggle("set", isSet);
  $("open-settings").title = isSet ? "Settings, some of which are set" : "Settings";
}

/** Tell of the fields that take JSON what is wrong with it. */
function showJsonErrors() {
  for (const name of ["schema", "other"]) {
    const error = jsonError(fields[name].value.trim());
    fields[name].setCustomValidity(error);
    fields[name].setAttribute("aria-invalid", String(Boolean(error)));
    $(`${name}-error`).textContent = error;
  }
}

function jsonError(text) {
  if (!text) return "";
  try {
    const given = JSON.parse(text);
    return given && typeof given === "object" && !Array.isArray(given) ? "" : "This is no JSON object.";
  } catch (error) { return `This is no JSON: ${error.message}.`; }
}

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
on("shown", showWhetherSet);

export function applyTheme() {
  const theme = load(LOOK) ?? "";
  document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
}
$("theme").addEventListener("change", () => { keep(LOOK, $("theme").value || null); applyTheme(); });
