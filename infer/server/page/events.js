// Events: a module tells of one, others act on it, and neither has to know the other.

const listeners = new Map();

/** Have `act` called whenever `name` is told. */
export function on(name, act) {
  if (!listeners.has(name)) listeners.set(name, []);
  listeners.get(name).push(act);
}

export function tell(name, ...what) {
  for (const act of listeners.get(name) ?? []) act(...what);
}
