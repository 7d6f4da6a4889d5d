// Answers: what is asked for, and what of it has come.

import { chats, contextOf, continues, modelOf, running } from "./chats.js";
import { tell } from "./events.js";
import { textOf } from "./files.js";
import { number } from "./format.js";
import { Failure, eventsOf, request } from "./server.js";
import { saveChat } from "./store.js";
import { addMessage, lastOf, pathOf, removeLast } from "./tree.js";

/** The messages as the server gets them: users' that nothing answers are one. */
function sentMessages(chat) {
  const sent = chat.settings.system ? [{ role: "system", content: chat.settings.system }] : [];
  for (const message of pathOf(chat)) {
    const { role } = message, content = textOf(message);
    if (!content) continue;
    if (role === "user" && sent.at(-1)?.role === "user") sent.at(-1).content += `\n\n${content}`;
    else sent.push({ role, content });
  }
  return sent;
}

export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "max_tokens", "seed"];

function asked(chat, model) {
  const { settings } = chat;
  const own = {};
  for (const name of NUMBERS) if (settings[name] !== undefined) own[name] = settings[name];
  if (settings.stop) own.stop = settings.stop.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (settings.schema) {
    const schema = JSON.parse(settings.schema);
    own.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  const other = settings.other ? JSON.parse(settings.other) : {};
  return { ...other, model, ...promptOf(chat, model), ...own, stream: true, stream_options: { include_usage: true } };
}

/** The messages, or the text, that a request sends: an answer that has only begun is no part of them. */
function promptOf(chat, model) {
  if (continues.has(model)) return { prompt: pathOf(chat).map(textOf).join("") };
  const messages = sentMessages(chat);
  const goesOn = messages.at(-1)?.role === "assistant" ? { continue_final_message: true } : {};
  return { messages, ...goesOn, ...thinking(chat.settings.thinking) };
}

/** How much is thought before the answer. "on" leaves the effort to the model. */
function thinking(how) {
  if (!how) return {};
  return how === "on" ? { chat_template_kwargs: { enable_thinking: true, thinking: true } } : { reasoning_effort: how };
}

/** Have the conversation's last message answered. */
export function answer(chat) {
  return run(chat, addMessage(chat, { role: "assistant", content: "", model: modelOf(chat) }));
}

/** Have the user's last message answered anew. What there was of an answer stays as a version. */
export function retry(chat) {
  if (running.has(chat.id)) return;
  const last = lastOf(chat);
  if (last?.role === "assistant") {
    if (last.content) chat.tip = last.parent;
    else removeLast(chat);
  }
  answer(chat);
}

/** Have the last answer go on where it ends. */
export function goOn(chat) {
  if (!running.has(chat.id)) run(chat, lastOf(chat));
}

async function run(chat, message) {
  const now = performance.now();
  const going = { chat, message, model: modelOf(chat), stop: new AbortController(), begin: now, saved: now,
    heard: now, first: null, last: null, pieces: 0, usage: null, finish: null };
  running.set(chat.id, going);
  delete message.error;
  message.note = "Interrupted."; // until it has ended
  chat.time = Date.now();
  saveChat(chat);
  tell("changed", chat);
  tell("asked", going);
  try {
    for await (const event of eventsOf(await asking(going))) take(going, event);
    delete message.note;
    const note = noteOf(going);
    if (note) message.note = note;
  } catch (error) {
    // A page that is left, or loaded anew, loses its connections first, and does not get beyond this.
    if (error.name !== "AbortError") await new Promise((done) => setTimeout(done, 200));
    failed(going, error);
  }
  count(going);
  running.delete(chat.id);
  if (!chats.has(chat.id)) return; // it was deleted
  saveChat(chat);
  tell("changed", chat);
  tell("ended", going);
}

/** The response; of a model without a chat template, the continuation of the text. */
async function asking({ chat, model, stop }) {
  const path = () => (continues.has(model) ? "v1/completions" : "v1/chat/completions");
  try {
    return await request(path(), asked(chat, model), stop.signal);
  } catch (error) {
    if (error.code !== "no_chat_template") throw error;
    continues.add(model);
    return request(path(), asked(chat, model), stop.signal);
  }
}

/** Take in an event of the stream. What there is of the answer is kept twice a second. */
function take(going, { choices: [choice], usage }) {
  const { chat, message } = going, now = performance.now();
  going.heard = now;
  if (usage) going.usage = usage;
  if (choice?.finish_reason) going.finish = choice.finish_reason;
  const reasoning = choice?.delta?.reasoning_content;
  const content = choice?.delta?.content ?? choice?.text;
  if (!reasoning && !content) return;
  going.last = now;
  going.first ??= now;
  going.pieces++;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  if (content) {
    if (message.reasoning) message.thought ??= now - going.first;
    message.content += content;
  }
  tell("piece", going);
  if (now - going.saved > 500 && chats.has(chat.id)) {
    going.saved = now;
    saveChat(chat);
  }
}

function noteOf({ message, finish }) {
  if (finish === "length") return "The answer was cut off: it reached the limit of tokens.";
  return message.content || message.reasoning ? null : "The model answered nothing.";
}

function failed({ message, model }, error) {
  if (error.name === "AbortError") { message.note = "Stopped."; return; }
  delete message.note;
  message.error = error.code === "context_length_exceeded" ? tooLong(model)
    : error instanceof Failure ? error.message : `The answer could not be read: ${error.message}`;
  if (error.status === 401) tell("key", "The server does not take this API key.");
  if (!(error instanceof Failure)) console.error(error);
}

/** In a line. The server's own words are for those who wrote a prompt, or started it. */
function tooLong(model) {
  const context = contextOf(model);
  const what = context ? `exceeds ${number.format(context)} tokens` : "is too long";
  return `The conversation ${what}. Shorten it, or start a new one.`;
}

/** Note what the answer took. What goes on adds to what there was. */
function count({ message, begin, first, last, pieces, usage }) {
  if (first === null) return;
  if (message.reasoning) message.thought ??= last - first;
  const before = message.stats;
  message.stats = {
    tokens: (before?.tokens ?? 0) + (usage?.completion_tokens ?? pieces),
    about: !usage || Boolean(before?.about),
    first: before?.first ?? first - begin,
    seconds: (before?.seconds ?? 0) + (last - first) / 1000,
    context: usage?.total_tokens,
  };
}
