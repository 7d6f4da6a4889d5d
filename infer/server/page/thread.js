// The conversation that is shown.

import { app, continues, modelOf, running } from "./chats.js";
import { $, button, el } from "./dom.js";
import { on, tell } from "./events.js";
import { number } from "./format.js";
import { viewOf } from "./message.js";
import { atEnd, toEnd } from "./scroll.js";
import { loadModels } from "./server.js";
import { speak, speakBlocks } from "./speech.js";
import { pathOf } from "./tree.js";

export function showTitle() {
  $("title").textContent = app.here.title;
  document.title = app.here.messages.length ? `${app.here.title} · infer` : "infer";
}

export function showThread() {
  app.views = new WeakMap();
  $("thread").replaceChildren();
  updateThread();
}

/** Show the messages of the conversation's path as they are now. Those that were shown keep their elements. */
function updateThread() {
  showTitle();
  const thread = $("thread"), path = pathOf(app.here);
  if (!path.length) { thread.replaceChildren(emptyNode()); return; }
  const nodes = path.map((message) => {
    let view = app.views.get(message);
    if (!view) app.views.set(message, (view = viewOf(app.here, message)));
    view.update(path);
    return view.node;
  });
  for (const node of [...thread.children]) if (!nodes.includes(node)) node.remove();
  for (const node of nodes) if (!node.isConnected) thread.append(node);
}

// Examples, to be asked with a click: of questions, and of texts to go on with
const QUESTIONS = [
  "Explain in simple words how a language model predicts the next word.",
  "Write a Python function that tells whether a text is a palindrome.",
  "Derive the quadratic formula step by step.",
  "Draft a friendly message that moves a meeting to Friday.",
];
const BEGINNINGS = ["Once upon a time", "The longest rivers of Europe are", "def fibonacci(n):"];

function emptyNode() {
  const model = app.models.find(({ id }) => id === modelOf(app.here));
  const node = el("div", { className: "empty" });
  if (app.serverError) {
    node.append(el("h2", {}, "Not connected"), el("p", {}, app.serverError.message),
      el("div", { className: "failed" }, button("Try again", "edge", loadModels)));
  } else if (model) {
    node.append(el("h2", {}, model.id));
    const most = model.max_model_len;
    if (most) node.append(el("p", {}, `Up to ${number.format(most)} tokens in a conversation`));
    node.append(el("p", {}, "Conversations are kept in this browser alone"));
    const goesOn = continues.has(model.id);
    if (goesOn) node.append(el("p", {}, "This model has no chat template: it continues your text as it stands."));
    const examples = (goesOn ? BEGINNINGS : QUESTIONS).map((text) =>
      button(text, "example", () => tell("ask", text)));
    node.append(el("div", { className: "examples", role: "group", "aria-label": "Examples" }, ...examples));
  }
  return node;
}

let frame = 0;

/** Show what has come of an answer, once in a frame, however many pieces come. */
function showPiece(going) {
  if (going.chat !== app.here || frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    if (going.chat !== app.here || running.get(going.chat.id) !== going) return;
    const follows = atEnd();
    app.views.get(going.message)?.update(pathOf(going.chat));
    if (follows) toEnd();
    speakBlocks(going, false);
  });
}

export function show(chat) {
  app.here = chat;
  speak(null);
  showThread();
  tell("shown");
  toEnd();
  $("text").focus();
}

on("changed", (chat) => {
  if (chat !== app.here) return;
  const follows = atEnd();
  updateThread();
  if (follows) toEnd();
});
on("piece", showPiece);
on("models", () => { if (!app.here.messages.length) showThread(); });
