// The field in which messages are typed, and the choice of the model that they go to.

import { answer } from "./answer.js";
import { hasFiles, takeFiles } from "./attach.js";
import { app, chats, contextOf, modelOf, newChat, running } from "./chats.js";
import { $, el, grow, onEnter } from "./dom.js";
import { on } from "./events.js";
import { number } from "./format.js";
import { closeMenu, notice } from "./list.js";
import { toEnd } from "./scroll.js";
import { saveChat } from "./store.js";
import { show, showThread } from "./thread.js";
import { addMessage, lastOf, pathOf, removeLast } from "./tree.js";

function showModels() {
  const select = $("model");
  select.replaceChildren(...app.models.map(({ id, parent }) =>
    el("option", { value: id }, parent ? `${id} (${parent})` : id)));
  select.value = modelOf(app.here) ?? "";
  select.disabled = app.models.length < 2;
}

function showSend() {
  const stops = running.has(app.here.id);
  const send = $("send");
  send.classList.toggle("stop", stops);
  send.setAttribute("aria-label", stops ? "Stop" : "Send");
  $("send-label").textContent = stops ? "Stop" : "Send";
  send.disabled = !stops && !$("text").value.trim() && !hasFiles();
  send.querySelector("use").setAttribute("href", stops ? "#i-stop" : "#i-send");
}

function send() {
  const text = $("text").value.trim();
  if ((!text && !hasFiles()) || running.has(app.here.id)) return;
  const files = takeFiles();
  $("text").value = "";
  grow($("text"));
  const last = lastOf(app.here);
  if (last?.role === "assistant" && !last.content && !last.error) removeLast(app.here); // it was stopped, or nothing
  if (!chats.has(app.here.id)) chats.set(app.here.id, app.here);
  if (!app.here.named && !app.here.messages.some(({ role }) => role === "user")) {
    const line = text.split("\n", 1)[0] || files[0].name;
    app.here.title = line.length > 60 ? `${line.slice(0, 60).trimEnd()} …` : line;
  }
  addMessage(app.here, { role: "user", content: text, ...(files.length && { files }) });
  notice("");
  answer(app.here);
  toEnd();
}

export function stopAnswer() {
  running.get(app.here.id)?.stop.abort();
  $("text").focus();
}

export function newConversation() {
  if (app.here.messages.length) show(newChat(app.here));
  else {
    closeMenu();
    $("text").focus();
  }
  return true;
}

/** Tell how much of the context the conversation takes: as it was after its last answer. */
function showContext() {
  const used = pathOf(app.here).findLast(({ stats }) => stats?.context)?.stats.context;
  const most = contextOf(modelOf(app.here));
  $("context").hidden = !used || !most;
  if ($("context").hidden) return;
  $("context").replaceChildren(
    el("meter", { min: 0, max: most, high: most * 0.8, value: used, "aria-hidden": "true" }),
    el("span", {}, `${Math.ceil((100 * used) / most)} %`),
    el("span", { className: "hidden" }, "of the context is used"),
  );
  $("context").title =
    `This conversation has ${number.format(used)} tokens of the ${number.format(most)} that the model's context holds.`;
}

onEnter($("text"), send);
$("text").addEventListener("input", () => { grow($("text")); showSend(); });
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running.has(app.here.id)) stopAnswer();
  else send();
});
$("down").addEventListener("click", () => { toEnd(); $("text").focus(); });
$("new").addEventListener("click", newConversation);
$("model").addEventListener("change", () => {
  app.here.model = $("model").value;
  showContext();
  if (app.here.messages.length) saveChat(app.here);
  else showThread();
});

on("models", () => { showModels(); showContext(); });
on("shown", () => { showModels(); showSend(); showContext(); });
on("changed", () => { showSend(); showContext(); });
on("attached", showSend);
on("ask", (text) => { $("text").value = text; send(); });
on("state", (text, progress) => {
  const [said, besides] = $("state").children; // a screen reader is not told each percent
  if (said.textContent !== text) said.textContent = text;
  besides.textContent = progress ? `, ${Math.floor(progress * 100)} %` : "";
});
