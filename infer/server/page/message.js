// A message as it is shown.

import { answer, retry } from "./answer.js";
import { continues, running } from "./chats.js";
import { $, button, copied, el, grow, onEnter } from "./dom.js";
import { number, seconds } from "./format.js";
import { Markdown } from "./markdown.js";
import { toEnd } from "./scroll.js";

function statsText({ tokens, about, first, seconds: took }) {
  const parts = [`${about ? "about " : ""}${number.format(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  if (tokens > 1 && took > 0.01) { // what came at once tells nothing
    const rate = (tokens - 1) / took;
    parts.push(`${number.format(rate < 10 ? Math.round(rate * 10) / 10 : Math.round(rate))} tokens/s`);
  }
  parts.push(`first after ${seconds(first / 1000)}`);
  return parts.join(" · ");
}

export class View {
  constructor(chat, message) {
    this.chat = chat;
    this.message = message;
    this.node = el("article", { className: message.role });
    this.update();
  }

  /** As the message is now. */
  update() {
    const { chat, message, node } = this;
    const isLast = chat.messages.at(-1) === message, isRunning = running.get(chat.id)?.message === message;
    node.classList.toggle("last", isLast || chat.messages.at(-2) === message);
    if (message.role === "user") {
      const idle = !running.has(chat.id), lastOfUser = chat.messages.findLast(({ role }) => role === "user") === message;
      const foot = el("div", { className: "foot" });
      if (idle && lastOfUser) foot.append(button("Edit", "quiet", () => this.edit()));
      node.setAttribute("aria-label", "You");
      node.replaceChildren(el("div", { className: "said" }, message.content), ...(foot.firstChild ? [foot] : []));
      return;
    }
    node.setAttribute("aria-label", message.model ?? "Model");
    if (!this.markdown) {
      this.markdown = new Markdown();
      this.rest = el("div");
      node.append(this.markdown.node, this.rest);
    }
    if (message.reasoning) this.updateReasoning(isRunning && !message.content);
    if (continues.has(message.model)) {
      // A continuation is text, and markdown only by chance.
      this.markdown.node.className = "said plain";
      this.markdown.node.textContent = message.content;
    } else this.markdown.show(message.content);
    this.markdown.node.hidden = !message.content;
    const state = [isRunning, isLast, running.has(chat.id), !message.content && !message.reasoning].join();
    if (state === this.state) return; // the buttons stay, and whatever has the focus
    this.state = state;
    const again = () => { retry(chat); toEnd(); $("text").focus(); };
    const foot = el("div", { className: "foot" });
    const rest = [];
    if (isRunning) {
      if (!message.content && !message.reasoning)
        rest.push(el("div", { className: "waiting", role: "img", "aria-label": "Waiting for the answer" }, el("i"), el("i"), el("i")));
    } else {
      if (message.error) {
        const failed = el("div", { className: "failed" }, el("p", {}, message.error));
        if (isLast && !running.has(chat.id)) failed.append(button("Try again", "edge", again));
        rest.push(failed);
      } else if (message.note) rest.push(el("p", { className: "note" }, message.note));
      if (message.content) {
        const copy = button("Copy", "quiet", () => copied(copy, message.content));
        foot.append(copy);
      }
      if (isLast && !message.error && !running.has(chat.id)) foot.append(button("Regenerate", "quiet", again));
      if (message.stats) foot.append(el("span", { className: "stats" }, statsText(message.stats)));
      if (foot.firstChild) rest.push(foot);
    }
    this.rest.replaceChildren(...rest);
  }

  updateReasoning(isThinking) {
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

  edit() {
    const { chat, message } = this;
    const field = el("textarea", { value: message.content, rows: 1, "aria-label": "Edit the message" });
    const cancel = () => { this.update(); $("text").focus(); };
    const send = () => {
      const text = field.value.trim();
      if (!text || running.has(chat.id)) return;
      chat.messages.splice(chat.messages.indexOf(message));
      chat.messages.push({ role: "user", content: text });
      $("text").focus();
      answer(chat);
    };
    onEnter(field, send);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    });
    field.addEventListener("input", () => grow(field));
    this.node.replaceChildren(el("div", { className: "editor" }, field,
      el("div", {}, button("Cancel", "edge", cancel), button("Send", "strong", send))));
    grow(field);
    field.focus();
  }
}
