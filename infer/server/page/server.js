// The server

import { app, running } from "./chats.js";
import { tell } from "./events.js";
import { KEY, load } from "./store.js";

export class Failure extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const UNREACHABLE = "The server cannot be reached. Is it still running?";

export async function request(path, body, signal) {
  const headers = {};
  const key = load(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure(UNREACHABLE);
  }
  if (response.ok) return response;
  let told = null;
  try { told = (await response.json()).error; } catch { /* not from our server */ }
  throw new Failure(told?.message ?? `The server answered with status ${response.status}.`, response.status, told?.code);
}

/** The events of a stream, up to [DONE]. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try { part = await reader.read(); } catch (error) {
      throw error.name === "AbortError" ? error : new Failure("The connection was lost before the answer had ended.");
    }
    if (part.done) throw new Failure("The connection was closed before the answer had ended.");
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(event.error.message);
      yield event;
    }
  }
}

export async function loadModels() {
  const before = JSON.stringify([app.models, app.serverError?.message]);
  try {
    app.models = (await (await request("v1/models")).json()).data;
    app.serverError = null;
  } catch (error) {
    app.models = [];
    app.serverError = error;
    app.isWell &&= error.status === 401; // or it is asked again
    const why = load(KEY) ? "The server does not take this API key." : "This server asks for an API key.";
    if (error.status === 401) tell("key", why);
  }
  if (JSON.stringify([app.models, app.serverError?.message]) === before) return; // what has the focus keeps it
  tell("models");
}

async function healthNow() {
  let response;
  try { response = await fetch("health"); } catch { return { status: "gone", message: UNREACHABLE }; }
  try { return await response.json(); } catch { return { status: "ok" }; } // not from our server
}

/** Tell what keeps the server from answering, which it is asked for as long as that lasts, and while an answer
    does not come. */
export async function watch(now) {
  const waits = () => [...running.values()].some(({ heard }) => performance.now() - heard > 2000);
  if (now || (!document.hidden && (!app.isWell || waits()))) {
    const { status, message, progress } = await healthNow();
    const was = app.isWell;
    app.isWell = status === "ok" && !message;
    const text = status === "loading" ? `Loading the model: ${message}` : message ?? "";
    tell("state", text, progress);
    const isAsking = app.serverError?.status === 401; // for a key, which may be half typed
    if (!now && !isAsking && (was !== app.isWell || !app.models.length)) await loadModels();
  }
  setTimeout(watch, 1000);
}
