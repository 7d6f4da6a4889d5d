// A message as it is shown.

import { answer, goOn, retry } from "./answer.js";
import { fileNode } from "./attach.js";
import { app, continues, running } from "./chats.js";
import { $, button, copied, el, grow, icon, onEnter } from "./dom.js";
import { tell } from "./events.js";
import { number, seconds } from "./format.js";
import { Markdown } from "./markdown.js";
import { toEnd } from "./scroll.js";
import { speak } from "./speech.js";
import { saveChat } from "./store.js";
import { addMessage, turnTo, versionsOf } from "./tree.js";

/** The tokens and the time of an answer, in a line whose parts are explained where the pointer rests on them. */
function statsNode({ tokens, about, first, seconds: took }) {
  const parts = [[`${about ? "about " : ""}${number.format(tokens)} ${tokens === 1 ? "token" : "tokens"}`,
    "How long the answer is, with what was thought before it. A token is a part of a word, or a short word."]];
  if (tokens > 1 && took > 0.01) { // what came at once tells nothing
    const rate = (tokens - 1) / took;
    parts.push([`${number.format(rate < 10 ? Math.round(rate * 10) / 10 : Math.round(rate))} tokens/s`,
      "How fast the answer was written, from its first token to its last."]);
  }
  parts.push([`first after ${seconds(first / 1000)}`,
    "How long the first token took: the server waited for its turn, and read the conversation."]);
  const nodes = parts.map(([text, title]) => el("span", { title }, text));
  return el("span", { className: "stats" }, ...nodes.flatMap((node, i) => (i ? [" · ", node] : [node])));
}

/** Whether a message would fill more than a screen of a phone. */
const isLong = (text) => text.length > 1200 || text.split("\n", 16).length > 15;

export const viewOf = (chat, message) => new (message.role === "user" ? Said : Answer)(chat, message);

class View {
  constructor(chat, message) {
    this.chat = chat;
    this.message = message;
    this.node = el("article", { className: message.role });
  }

  /** Show the message as it is now. path: the messages that are shown. */
  update(path) {
    const { chat, message, node } = this;
    this.isLast = path.at(-1) === message;
    this.isIdle = !running.has(chat.id);
    node.classList.toggle("last", this.isLast || path.at(-2) === message);
    if (!this.editor) this.fill();
  }

  foot(...children) {
    const foot = el("div", { className: "foot" }, ...children.filter(Boolean));
    return foot.firstChild ? [foot] : [];
  }

  /** Buttons to go from this version of the message to another; null where there is no other. */
  versions() {
    const { chat, message } = this;
    const all = versionsOf(chat, message), at = all.indexOf(message);
    if (all.length < 2 || !this.isIdle) return null;
    const to = (other, name, label) => el("button", { type: "button", className: "icon", disabled: !other,
      title: label, "aria-label": label, onclick: () => turn(chat, other, name) }, icon(name));
    return el("span", { className: "versions" }, to(all[at - 1], "back", "Previous version"),
      el("span", {}, `${at + 1} of ${all.length}`), to(all[at + 1], "forth", "Next version"));
  }

  /** Edit the message in its place; done, as the button says, gets what it is then. */
  edit(label, done) {
    const field = el("textarea", { value: this.message.content, rows: 1, "aria-label": "Edit the message" });
    const end = () => { this.editor = null; this.reset(); this.fill(); $("text").focus(); };
    const act = () => {
      const text = this.trimmed(field.value);
      if (!text.trim() || running.has(this.chat.id)) return;
      end();
      if (text !== this.message.content) done(text);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); end(); }
    });
    field.addEventListener("input", () => grow(field));
    this.editor = el("div", { className: "editor" }, field,
      el("div", {}, button("Cancel", "edge", end), button(label, "strong", act)));
    this.node.replaceChildren(this.editor);
    grow(field);
    field.focus();
    this.editor.scrollIntoView({ block: "nearest" });
    return { field, act };
  }

  reset() { this.node.replaceChildren(); }
  trimmed(text) { return text; } // an answer may go on, and then spaces at its ends count
}

/** Show another version of a message. The focus stays at the button, or where that is at its end, beside it. */
function turn(chat, message, name) {
  turnTo(chat, message);
  saveChat(chat);
  tell("changed", chat);
  const buttons = [...app.views.get(message).node.querySelectorAll(".versions button")];
  if (name === "forth") buttons.reverse();
  buttons.find((each) => !each.disabled)?.focus();
  const all = versionsOf(chat, message);
  speak(`Version ${all.indexOf(message) + 1} of ${all.length}.`);
}

/** A message of the user. */
class Said extends View {
  trimmed(text) { return text.trim(); }

  fill() {
    const { message, node } = this;
    const edit = this.isIdle && button("Edit", "quiet", () => this.change());
    const said = el("div", { className: "said" }, message.content);
    node.setAttribute("aria-label", "You");
    said.hidden = !message.content;
    const fold = isLong(message.content) && this.fold(said);
    node.replaceChildren(...(message.files ?? []).map(fileNode), said, ...this.foot(fold, this.versions(), edit));
  }

  /** Fold a long text, and give a button to see all of it. */
  fold(said) {
    const more = button("", "quiet", () => { this.isOpen = !this.isOpen; set(); });
    const set = () => {
      said.classList.toggle("folded", !this.isOpen);
      more.setAttribute("aria-expanded", String(Boolean(this.isOpen)));
      more.textContent = this.isOpen ? "Show less" : "Show all";
    };
    set();
    return more;
  }

  change() {
    const { chat, message } = this;
    const { files } = message;
    const { field, act } = this.edit("Send", (content) => {
      addMessage(chat, { role: "user", content, ...(files && { files }) }, message.parent);
      answer(chat);
    });
    onEnter(field, act);
  }
}

/** An answer. Its text grows in place; what is around it is made anew where it has changed. */
class Answer extends View {
  reset() {
    super.reset();
    this.markdown = this.reasoning = this.state = null;
  }

  fill() {
    const { chat, message, node } = this;
    const isRunning = running.get(chat.id)?.message === message;
    node.setAttribute("aria-label", message.model ?? "Model");
    if (!this.markdown) {
      this.markdown = new Markdown();
      this.rest = el("div");
      node.append(this.markdown.node, this.rest);
    }
    if (message.reasoning) this.fillReasoning(isRunning && !message.content);
    this.fillText();
    const isEmpty = !message.content && !message.reasoning;
    const state = [isRunning, this.isLast, this.isIdle, isEmpty, versionsOf(chat, message).length].join();
    if (state === this.state) return; // the buttons stay, and whatever has the focus
    this.state = state;
    this.rest.replaceChildren(...(isRunning ? (isEmpty ? [waiting()] : []) : this.ended()));
  }

  fillText() {
    const { content, model } = this.message, { node } = this.markdown;
    if (continues.has(model)) {
      // A continuation is text, and markdown only by chance.
      node.className = "said plain";
      node.textContent = content;
    } else this.markdown.show(content);
    node.hidden = !content;
  }

  fillReasoning(isThinking) {
    const { message } = this;
    if (!this.reasoning) {
      this.reasoning = new Markdown();
      this.summary = el("summary");
      this.node.prepend(el("details", { className: "reasoning" }, this.summary, this.reasoning.node));
    }
    const text = isThinking ? "Thinking …"
      : message.thought === undefined ? "Reasoning" : `Thought for ${seconds(message.thought / 1000)}`;
    if (this.summary.textContent !== text) this.summary.textContent = text;
    this.reasoning.show(message.reasoning);
  }

  /** Returns the elements below an answer that has ended. */
  ended() {
    const { chat, message } = this;
    const acts = this.isLast && this.isIdle;
    const follow = (act) => () => { act(chat); toEnd(); $("text").focus(); };
    const more = acts && message.content && button("Continue", message.error ? "edge" : "quiet", follow(goOn));
    const rest = [];
    if (message.error) {
      const again = acts && button("Try again", "edge", follow(retry));
      rest.push(el("div", { className: "failed" }, el("p", {}, message.error), ...[again, more].filter(Boolean)));
    } else if (message.note) rest.push(el("p", { className: "note" }, message.note));
    const copy = message.content && button("Copy", "quiet", () => copied(copy, message.content));
    return [...rest, ...this.foot(
      this.versions(),
      copy,
      this.isIdle && message.content && button("Edit", "quiet", () => this.change()),
      !message.error && more,
      acts && !message.error && button("Regenerate", "quiet", follow(retry)),
      message.edited && el("span", { className: "stats" }, "Edited"),
      message.stats && statsNode(message.stats),
    )];
  }

  change() {
    const { chat, message } = this;
    const { reasoning, thought, model } = message;
    this.edit("Save", (content) => {
      addMessage(chat, { role: "assistant", content, reasoning, thought, model, edited: true }, message.parent);
      saveChat(chat);
      tell("changed", chat);
    });
  }
}

const waiting = () => el("div", { className: "waiting", role: "img", "aria-label": "Waiting for the answer" },
  el("i"), el("i"), el("i"));
