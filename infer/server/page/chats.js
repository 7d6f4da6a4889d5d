// Conversations, and what the page knows.

/** One that goes on with the model and the settings of another. */
export function newChat({ model = null, settings = {} } = {}) {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  const nothing = { title: "New conversation", named: false, time: 0, messages: [], tip: null };
  return { id, model, settings: { ...settings }, ...nothing };
}

/** The state of the page: the conversation that it shows, and what it knows of the server. */
export const app = {
  models: [],
  serverError: null, // why the models are not known
  isWell: true, // whether the server has nothing to say of itself
  here: newChat(), // the conversation that is shown
  views: new WeakMap(), // by message, what shows it
};

export const chats = new Map(); // all of them, by their ids
export const running = new Map(); // by conversation, the answer that comes: {message, stop, ...}
export const continues = new Set(); // models without a chat template: they continue a text

/** The model that answers: the conversation's, if it is still there. */
export function modelOf(chat) {
  return (app.models.find(({ id }) => id === chat.model) ?? app.models[0])?.id ?? chat.model;
}

/** How many tokens a conversation with a model may have, where that is known. */
export const contextOf = (model) => app.models.find(({ id }) => id === model)?.max_model_len;
