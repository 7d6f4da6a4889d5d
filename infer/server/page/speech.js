// A screen reader gets an answer block by block, each when it has ended.

import { app } from "./chats.js";
import { $, el } from "./dom.js";
import { on } from "./events.js";

export function speakBlocks(run, ended) {
  const written = app.views.get(run.message)?.markdown;
  if (!written) return;
  const count = written.shown.length - (ended ? 0 : 1);
  for (; run.spoken < count; run.spoken++) speak(written.said(run.spoken), true);
}

export function speak(text, more = false) {
  if (!more) $("spoken").replaceChildren();
  if (text) $("spoken").append(el("p", {}, text));
}

on("asked", () => speak(null));
on("ended", (chat, run) => {
  if (chat !== app.here) return;
  speakBlocks(run, true);
  speak(run.message.error ?? run.message.note ?? null, true);
});
