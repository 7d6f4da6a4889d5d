// Numbers and times as people read them.

export const number = new Intl.NumberFormat("en");

export function seconds(value) {
  return value < 10 ? `${value.toFixed(value < 1 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

const DAY = 24 * 60 * 60 * 1000;
const month = new Intl.DateTimeFormat("en", { month: "long", year: "numeric" });
const moment = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

export const timeOf = (time) => moment.format(time);

/** The heading in a list under which something of this time stands. */
export function dayOf(time, now = Date.now()) {
  const days = Math.round((new Date(now).setHours(0, 0, 0, 0) - new Date(time).setHours(0, 0, 0, 0)) / DAY);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  if (days <= 30) return "Last 30 days";
  return month.format(time);
}
