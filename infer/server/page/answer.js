// Answers: what is asked for, and what of it has come.

import { app, chats, continues, modelOf, running } from "./chats.js";
import { tell } from "./events.js";
import { number } from "./format.js";
import { Failure, eventsOf, request } from "./server.js";
import { saveChat } from "./store.js";

/** The messages as the server gets them: users' that nothing answers are one. */
function sentMessages(chat) {
  const sent = chat.settings.system ? [{ role: "system", content: chat.settings.system }] : [];
  for (const { role, content } of chat.messages) {
    if (!content) continue;
    if (role === "user" && sent.at(-1)?.role === "user") sent.at(-1).content += `\n\n${content}`;
    else sent.push({ role, content });
  }
  return sent;
}

function asked(chat, model) {
  const { temperature, top_p, max_tokens, seed } = chat.settings;
  const own = { temperature, top_p, max_tokens, seed };
  for (const [name, value] of Object.entries(own)) if (value === undefined) delete own[name];
  const what = continues.has(model)
    ? { prompt: chat.messages.map(({ content }) => content).join("") }
    : { messages: sentMessages(chat) };
  return { model, ...what, ...own, stream: true, stream_options: { include_usage: true } };
}

/** Have the conversation's last message answered. */
export async function answer(chat) {
  const model = modelOf(chat);
  const stop = new AbortController();
  const message = { role: "assistant", content: "", model, note: "Interrupted." }; // until it has ended
  const run = { message, stop, spoken: 0, saved: performance.now(), last: performance.now() };
  running.set(chat.id, run);
  const begin = performance.now();
  let first = null, last = null, thought = null, pieces = 0, usage = null, finish = null;
  // What is asked must not have the answer in it.
  let body = asked(chat, model);
  chat.messages.push(message);
  chat.time = Date.now();
  saveChat(chat);
  tell("changed", chat);
  tell("asked", chat);
  try {
    let response;
    try {
      response = await request(continues.has(model) ? "v1/completions" : "v1/chat/completions", body, stop.signal);
    } catch (error) {
      if (error.code !== "no_chat_template") throw error;
      continues.add(model);
      chat.messages.pop();
      body = asked(chat, model);
      chat.messages.push(message);
      response = await request("v1/completions", body, stop.signal);
    }
    for await (const { choices, usage: counted } of eventsOf(response)) {
      run.last = performance.now();
      if (counted) usage = counted;
      const [choice] = choices;
      if (!choice) continue;
      if (choice.finish_reason) finish = choice.finish_reason;
      const reasoning = choice.delta?.reasoning_content;
      const content = choice.delta?.content ?? choice.text;
      if (!reasoning && !content) continue;
      last = performance.now();
      first ??= last;
      pieces++;
      if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
      if (content) {
        if (message.reasoning && thought === null) message.thought = (thought = last) - first;
        message.content += content;
      }
      progressed(chat, run);
    }
    delete message.note;
    if (finish === "length") message.note = "The answer was cut off: it reached the limit of tokens.";
    else if (!message.content && !message.reasoning) message.note = "The model answered nothing.";
  } catch (error) {
    // A page that is left, or loaded anew, loses its connections first, and does not get beyond this.
    if (error.name !== "AbortError") await new Promise((done) => setTimeout(done, 200));
    delete message.note;
    if (error.name === "AbortError") message.note = "Stopped.";
    else {
      message.error = error.code === "context_length_exceeded" ? tooLong(model)
        : error instanceof Failure ? error.message : `The answer could not be read: ${error.message}`;
      if (error.status === 401) tell("key", "The server does not take this API key.");
      if (!(error instanceof Failure)) console.error(error);
    }
  }
  if (message.reasoning && message.thought === undefined && last !== null) message.thought = last - first;
  if (first !== null) {
    const tokens = usage?.completion_tokens ?? pieces;
    message.stats = { tokens, about: !usage, first: first - begin, seconds: (last - first) / 1000 };
  }
  running.delete(chat.id);
  if (!chats.has(chat.id)) return; // it was deleted
  saveChat(chat);
  tell("changed", chat);
  tell("ended", chat, run);
}

/** Have the last message answered anew. */
export function retry(chat) {
  if (running.has(chat.id)) return;
  if (chat.messages.at(-1)?.role === "assistant") chat.messages.pop();
  answer(chat);
}

/** In a line. The server's own words are for those who wrote a prompt, or started it. */
function tooLong(model) {
  const context = app.models.find(({ id }) => id === model)?.max_model_len;
  const what = context ? `exceeds ${number.format(context)} tokens` : "is too long";
  return `The conversation ${what}. Shorten it, or start a new one.`;
}

/** A piece has come. What there is of the answer is kept twice a second. */
function progressed(chat, run) {
  tell("piece", chat, run);
  if (performance.now() - run.saved > 500) {
    run.saved = performance.now();
    saveChat(chat);
  }
}
