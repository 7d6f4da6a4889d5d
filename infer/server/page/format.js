// Numbers and times as people read them.

export const number = new Intl.NumberFormat("en");

export function seconds(value) {
  return value < 10 ? `${value.toFixed(value < 1 ? 2 : 1)} s` : `${Math.round(value)} s`;
}
