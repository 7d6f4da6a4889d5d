// A conversation's messages are a tree: where one is edited or answered anew, the old and the new go on from
// the same message. `chat.messages` has all of them, each after its parent; `chat.tip` is the last that is shown.

const newId = () => Math.random().toString(36).slice(2, 10);

/** The messages that are shown, from the first to the last. */
export function pathOf(chat) {
  const byId = new Map(chat.messages.map((message) => [message.id, message]));
  const path = [];
  for (let each = byId.get(chat.tip); each; each = byId.get(each.parent)) path.push(each);
  return path.reverse();
}

export const lastOf = (chat) => chat.messages.find(({ id }) => id === chat.tip);

/** A message and those that stand in its place in other versions of the conversation, the oldest first. */
export const versionsOf = (chat, message) => chat.messages.filter(({ parent }) => parent === message.parent);

/** Add a message after another, or else after the last one, and show it as the last. */
export function addMessage(chat, message, parent = chat.tip) {
  Object.assign(message, { id: newId(), parent });
  chat.messages.push(message);
  chat.tip = message.id;
  return message;
}

/** Remove the last message. Nothing follows it, or it would not be the last. */
export function removeLast(chat) {
  const last = lastOf(chat);
  chat.messages.splice(chat.messages.indexOf(last), 1);
  chat.tip = last.parent;
}

/** Show a message with what follows it; of versions of that, the newest. */
export function turnTo(chat, message) {
  let last = message;
  for (let next = message; next; next = chat.messages.findLast(({ parent }) => parent === last.id)) last = next;
  chat.tip = last.id;
}

const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A conversation out of JSON from elsewhere, or null: nothing but what the page knows, in the types that it
    expects. It has {id, title, named, time, model, settings, messages, tip}. Messages that were kept before
    there were versions have no places, and come one after the other. */
export function chatOf(given) {
  if (!isText(given?.id) || !isText(given.title) || !Array.isArray(given.messages)) return null;
  const chat = {
    id: given.id,
    title: given.title.slice(0, 200),
    named: Boolean(given.named),
    time: isNumber(given.time) ? given.time : 0,
    model: isText(given.model) ? given.model : null,
    settings: settingsOf(given.settings),
    messages: [],
    tip: null,
  };
  const ids = new Set([null]);
  for (const each of given.messages) {
    const isOld = each?.parent === undefined;
    const message = messageOf(each);
    if (!message || !(isOld || ids.has(each.parent))) continue; // nor what came after it
    addMessage(chat, message, isOld ? chat.tip : each.parent);
    if (isText(each.id)) message.id = chat.tip = each.id;
    ids.add(message.id);
  }
  if (ids.has(given.tip)) chat.tip = given.tip;
  return chat;
}

/** Texts and numbers; which of them mean something is the page's and the server's to say. */
const settingsOf = (given) =>
  Object.fromEntries(Object.entries(given ?? {}).filter(([, value]) => isText(value) || isNumber(value)));

function messageOf(given) {
  if (!["user", "assistant"].includes(given?.role) || !isText(given.content)) return null;
  const message = { role: given.role, content: given.content };
  for (const name of ["reasoning", "model", "note", "error"]) if (isText(given[name])) message[name] = given[name];
  if (isNumber(given.thought)) message.thought = given.thought;
  if (given.edited === true) message.edited = true;
  const files = Array.isArray(given.files) ? given.files.filter((each) => isText(each?.name) && isText(each.text)) : [];
  if (files.length) message.files = files.map(({ name, text }) => ({ name, text }));
  const stats = statsOf(given.stats);
  if (stats) message.stats = stats;
  return message;
}

function statsOf(given) {
  const { tokens, about, first, seconds, context } = given ?? {};
  if (![tokens, first, seconds].every(isNumber)) return null;
  return { tokens, about: Boolean(about), first, seconds, context: isNumber(context) ? context : undefined };
}
