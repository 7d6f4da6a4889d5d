// What one module tells and others act on, so that none has to know those that show what it does.

const listeners = new Map();

/** Have `act` called whenever `name` is told. */
export function on(name, act) {
  if (!listeners.has(name)) listeners.set(name, []);
  listeners.get(name).push(act);
}

export function tell(name, ...what) {
  for (const act of listeners.get(name) ?? []) act(...what);
}
