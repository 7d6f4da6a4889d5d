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

/** Give messages their places that were kept before there were versions, one after the other. */
export function planted(chat) {
  let parent = null;
  for (const message of chat.messages) {
    message.id ??= newId();
    if (message.parent === undefined) message.parent = parent;
    parent = message.id;
  }
  if (chat.tip === undefined) chat.tip = parent;
  return chat;
}
