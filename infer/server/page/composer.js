// What is typed, and to which model it goes.

import { answer } from "./answer.js";
import { app, chats, modelOf, newChat, running } from "./chats.js";
import { $, el, grow, onEnter } from "./dom.js";
import { on } from "./events.js";
import { closeMenu, notice } from "./list.js";
import { toEnd } from "./scroll.js";
import { saveChat } from "./store.js";
import { show, showThread } from "./thread.js";
import { addMessage, lastOf, removeLast } from "./tree.js";

function showModels() {
  const select = $("model");
  select.replaceChildren(...app.models.map(({ id, parent }) =>
    el("option", { value: id }, parent ? `${id} (${parent})` : id)));
  select.value = modelOf(app.here) ?? "";
  select.disabled = app.models.length < 2;
}

export function showSend() {
  const stops = running.has(app.here.id);
  const send = $("send");
  send.classList.toggle("stop", stops);
  send.setAttribute("aria-label", stops ? "Stop" : "Send");
  send.disabled = !stops && !$("text").value.trim();
  send.querySelector("use").setAttribute("href", stops ? "#i-stop" : "#i-send");
}

function send() {
  const text = $("text").value.trim();
  if (!text || running.has(app.here.id)) return;
  $("text").value = "";
  grow($("text"));
  const last = lastOf(app.here);
  if (last?.role === "assistant" && !last.content && !last.error) removeLast(app.here); // it was stopped, or nothing
  if (!chats.has(app.here.id)) chats.set(app.here.id, app.here);
  if (!app.here.named && !app.here.messages.some(({ role }) => role === "user")) {
    const line = text.split("\n", 1)[0];
    app.here.title = line.length > 60 ? `${line.slice(0, 60).trimEnd()} …` : line;
  }
  addMessage(app.here, { role: "user", content: text });
  notice("");
  answer(app.here);
  toEnd();
}

export function stopAnswer() {
  running.get(app.here.id)?.stop.abort();
  $("text").focus();
}

onEnter($("text"), send);
$("text").addEventListener("input", () => { grow($("text")); showSend(); });
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running.has(app.here.id)) stopAnswer();
  else send();
});
$("down").addEventListener("click", () => { toEnd(); $("text").focus(); });
$("new").addEventListener("click", () => { if (app.here.messages.length) show(newChat(app.here)); else { closeMenu(); $("text").focus(); } });
$("model").addEventListener("change", () => {
  app.here.model = $("model").value;
  if (app.here.messages.length) saveChat(app.here);
  else showThread();
});

on("models", showModels);
on("shown", () => { showModels(); showSend(); });
on("changed", showSend);
on("state", (text, progress) => {
  const [said, besides] = $("state").children; // a screen reader is not told each percent
  if (said.textContent !== text) said.textContent = text;
  besides.textContent = progress ? `, ${Math.floor(progress * 100)} %` : "";
});
