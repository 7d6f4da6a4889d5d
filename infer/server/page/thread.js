// The conversation that is shown.

import { app, continues, modelOf } from "./chats.js";
import { $, button, el } from "./dom.js";
import { on, tell } from "./events.js";
import { number } from "./format.js";
import { View } from "./message.js";
import { atEnd, toEnd } from "./scroll.js";
import { loadModels } from "./server.js";
import { speak, speakBlocks } from "./speech.js";

export function showTitle() {
  $("title").textContent = app.here.title;
  document.title = app.here.messages.length ? `${app.here.title} · infer` : "infer";
}


export function showThread() {
  showTitle();
  app.views = new WeakMap();
  const shown = app.here.messages.map((message) => {
    const view = new View(app.here, message);
    app.views.set(message, view);
    return view.node;
  });
  $("thread").replaceChildren(...(shown.length ? shown : [emptyNode()]));
}

function emptyNode() {
  const model = app.models.find(({ id }) => id === modelOf(app.here));
  const node = el("div", { className: "empty" });
  if (app.serverError) {
    node.append(el("h2", {}, "Not connected"), el("p", {}, app.serverError.message),
      el("div", { className: "failed" }, button("Try again", "edge", loadModels)));
  } else if (model) {
    node.append(el("h2", {}, model.id));
    if (model.max_model_len) node.append(el("p", {}, `Up to ${number.format(model.max_model_len)} tokens in a conversation`));
    node.append(el("p", {}, "Conversations are kept in this browser alone"));
    if (continues.has(model.id)) node.append(el("p", {}, "This model has no chat template: it continues your text as it stands."));
  }
  return node;
}

/** A conversation has another message, or an answer has begun or ended. */
function changed(chat) {
  if (chat !== app.here) return;
  const follows = atEnd();
  const thread = $("thread");
  if (thread.querySelector(".empty")) thread.replaceChildren();
  const nodes = chat.messages.map((message) => {
    let view = app.views.get(message);
    if (view) view.update();
    else app.views.set(message, (view = new View(chat, message)));
    return view.node;
  });
  for (const node of [...thread.children]) if (!nodes.includes(node)) node.remove();
  for (const node of nodes) if (!node.isConnected) thread.append(node);
  showTitle();
  if (follows) toEnd();
}

/** Shown once in a frame, however many pieces come. */
function piece(chat, run) {
  if (chat !== app.here || frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    if (chat !== app.here) return;
    const follows = atEnd();
    app.views.get(run.message)?.update();
    if (follows) toEnd();
    speakBlocks(run, false);
  });
}

let frame = 0;
on("changed", changed);
on("piece", piece);
on("models", () => { if (!app.here.messages.length) showThread(); });

export function show(chat) {
  app.here = chat;
  speak(null);
  showThread();
  tell("shown");
  toEnd();
  $("text").focus();
}
