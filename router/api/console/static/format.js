// Formats numbers. A missing value becomes a dash.

const NONE = "–";
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clockTime = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});

export const count = (value) =>
  value === undefined || value === null ? NONE : grouped.format(value);

export function seconds(value) {
  if (value === undefined || value === null) return NONE;
  if (value === 0) return "0 ms";
  if (value < 0.01) return `${(1000 * value).toFixed(2)} ms`;
  if (value < 0.1) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 1) return `${(1000 * value).toFixed(0)} ms`;
  if (value < 60) return `${value.toFixed(2)} s`;
  return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
}

export const axisSeconds = (value) =>
  value < 1 ? `${Number((1000 * value).toPrecision(2))} ms` : `${Number(value.toPrecision(2))} s`;

export function bytes(value) {
  if (!value) return NONE;
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value > 0 && value < 10 ? value.toFixed(1) : grouped.format(value);
}

export const watts = (value) => `${value.toFixed(value < 10 ? 1 : 0)} W`;
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : NONE);
export const clock = (unixSeconds) => clockTime.format(new Date(1000 * unixSeconds));

// Worker ids are ROLE-RANDOM; their first characters differ.
export function shortId(id) {
  if (!id) return NONE;
  return id.length > 18 ? `${id.slice(0, 16)}…` : id;
}

export const plural = (number, one, many = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : many}`;
