// A screen reader gets an answer block by block, each when it has ended.

import { app } from "./chats.js";
import { $, el } from "./dom.js";
import { on } from "./events.js";

export function speakBlocks(going, ended) {
  const markdown = app.views.get(going.message)?.markdown;
  if (!markdown) return;
  const count = markdown.shown.length - (ended ? 0 : 1);
  for (; going.spoken < count; going.spoken++) speak(markdown.said(going.spoken), true);
}

export function speak(text, more = false) {
  if (!more) $("spoken").replaceChildren();
  if (text) $("spoken").append(el("p", {}, text));
}

on("asked", (going) => {
  // An answer that goes on is read aloud from its last block on.
  going.spoken = Math.max(0, (app.views.get(going.message)?.markdown?.shown.length ?? 0) - 1);
  speak(null);
});
on("ended", (going) => {
  if (going.chat !== app.here) return;
  speakBlocks(going, true);
  speak(going.message.error ?? going.message.note ?? null, true);
});
