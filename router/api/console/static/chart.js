// Draws lines over the last minutes as SVG. A line has a gap where its values are null for more
// than GAP seconds. The pointer, or the arrow keys while the chart has the focus, select a single
// second.

import { h, setAttribute, setText, svg } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 148;
const PAD = { left: 52, right: 8, top: 10, bottom: 20 };
const WINDOW = 300; // seconds
const GAP = 10; // seconds that a line bridges without a value
const TICKS = 3;

// Returns the smallest step of the form 1, 2 or 5 times a power of ten, of which TICKS steps reach
// `value`.
function stepFor(value) {
  const raw = value / TICKS;
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((each) => each * power >= raw * 0.999);
}

export class Chart {
  // `lines`: {id, name, of(sample) -> number or null}; `format` writes values, `axis` the labels of
  // the axis; `least`: the lowest end of the axis.
  constructor(title, lines, { format, axis = format, least }) {
    Object.assign(this, {
      title,
      lines,
      format,
      axis,
      least,
      samples: [],
      end: 0,
      width: 0,
      marked: null,
    });
    this.now = lines.map(() => h("b"));
    this.figure = h(
      "figure",
      { class: "panel chart" },
      h(
        "figcaption",
        {},
        h("h3", { text: title }),
        h(
          "ul",
          { class: "legend" },
          lines.map((line, index) =>
            h(
              "li",
              {},
              h("i", { class: `swatch line-${line.id}` }),
              `${line.name} `,
              this.now[index],
            ),
          ),
        ),
      ),
    );
    this.grid = svg("g", { class: "grid" });
    this.paths = lines.map((line) => svg("path", { class: `line line-${line.id}` }));
    this.dots = lines.map((line) => svg("path", { class: `dots line-${line.id}` }));
    this.cross = svg("line", {
      class: "cross",
      y1: PAD.top,
      y2: HEIGHT - PAD.bottom,
      visibility: "hidden",
    });
    // The first line is on top.
    const layers = [this.grid, [...this.paths].reverse(), [...this.dots].reverse(), this.cross];
    this.plot = svg(
      "svg",
      { class: "plot", height: HEIGHT, role: "img", tabindex: 0 },
      layers.flat(),
    );
    this.note = h("div", { class: "chart-note", role: "status", hidden: true });
    this.empty = h("p", { class: "chart-empty", text: "No requests in the last 5 minutes" });
    this.figure.append(h("div", { class: "chart-body" }, this.plot, this.empty, this.note));
    this.plot.addEventListener("pointermove", (event) => this.mark(this.indexAt(event.offsetX)));
    this.plot.addEventListener("pointerleave", () => this.mark(null));
    this.plot.addEventListener("blur", () => this.mark(null));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.paint();
    }).observe(this.figure.lastChild);
  }

  show(samples) {
    this.samples = samples;
    this.end = samples.length ? samples[samples.length - 1].time : 0;
    this.paint();
  }

  x(time) {
    return (
      this.width - PAD.right - ((this.end - time) / WINDOW) * (this.width - PAD.left - PAD.right)
    );
  }

  y(value) {
    return HEIGHT - PAD.bottom - (value / this.top) * (HEIGHT - PAD.top - PAD.bottom);
  }

  paint() {
    if (!this.width) return;
    const values = this.samples
      .flatMap((sample) => this.lines.map((line) => line.of(sample)))
      .filter((each) => each !== null);
    const step = stepFor(Math.max(this.least, ...values));
    this.top = step * TICKS;
    setAttribute(this.plot, "width", this.width);
    this.paintGrid(step);
    this.lines.forEach((line, index) => this.paintLine(line, index));
    const hasValues = values.some((each) => each > 0);
    this.empty.hidden = hasValues || !this.samples.length;
    setAttribute(this.plot, "aria-label", this.summary(hasValues));
    this.mark(this.marked);
  }

  paintGrid(step) {
    const lines = [];
    for (let tick = 0; tick <= TICKS; tick += 1) {
      const y = Math.round(this.y(tick * step)) + 0.5;
      lines.push(svg("line", { x1: PAD.left, x2: this.width - PAD.right, y1: y, y2: y }));
      lines.push(
        svg("text", {
          x: PAD.left - 8,
          y: y + 3.5,
          "text-anchor": "end",
          text: tick ? this.axis(tick * step) : "0",
        }),
      );
    }
    for (const minute of [4, 3, 2, 1])
      lines.push(
        svg("text", {
          x: this.x(this.end - 60 * minute),
          y: HEIGHT - 5,
          "text-anchor": "middle",
          text: `−${minute} min`,
        }),
      );
    lines.push(
      svg("text", { x: this.width - PAD.right, y: HEIGHT - 5, "text-anchor": "end", text: "now" }),
    );
    this.grid.replaceChildren(...lines);
  }

  paintLine(line, index) {
    const known = this.samples
      .map((sample) => [sample.time, line.of(sample)])
      .filter(([, value]) => value !== null);
    let path = "";
    let dots = "";
    known.forEach(([time, value], number) => {
      const joins = (other) => other && Math.abs(other[0] - time) <= GAP;
      const place = `${this.x(time).toFixed(1)} ${this.y(value).toFixed(1)}`;
      path += `${joins(known[number - 1]) ? "L" : "M"}${place}`;
      // A line of a single value would be invisible.
      if (!joins(known[number - 1]) && !joins(known[number + 1])) dots += `M${place}h0`;
    });
    setAttribute(this.paths[index], "d", path);
    setAttribute(this.dots[index], "d", dots);
    setText(this.now[index], known.length ? this.format(known[known.length - 1][1]) : "–");
  }

  summary(hasValues) {
    if (!hasValues) return `${this.title}: no values in the last 5 minutes`;
    const last = this.lines
      .map((line, index) => `${line.name} ${this.now[index].textContent}`)
      .join(", ");
    return `${this.title}, last 5 minutes. Latest: ${last}. Arrow keys select single seconds.`;
  }

  indexAt(offset) {
    if (!this.samples.length) return null;
    const time =
      this.end - ((this.width - PAD.right - offset) / (this.width - PAD.left - PAD.right)) * WINDOW;
    let best = 0;
    this.samples.forEach((sample, index) => {
      if (Math.abs(sample.time - time) < Math.abs(this.samples[best].time - time)) best = index;
    });
    return this.samples[best].time;
  }

  step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.samples.length) return;
    event.preventDefault();
    const last = this.samples.length - 1;
    const found = this.samples.findIndex((sample) => sample.time === this.marked);
    const next = (found < 0 ? last + 1 : found) + moves[event.key];
    this.mark(this.samples[Math.max(0, Math.min(last, next))].time);
  }

  // Marks the sample of this time. The mark moves with the window.
  mark(time) {
    const sample = this.samples.find((each) => each.time === time);
    this.marked = sample ? time : null;
    setAttribute(this.cross, "visibility", sample ? "visible" : "hidden");
    this.note.hidden = !sample;
    if (!sample) return;
    const x = this.x(time);
    setAttribute(this.cross, "x1", x);
    setAttribute(this.cross, "x2", x);
    const values = this.lines.map((line) => {
      const value = line.of(sample);
      return h(
        "span",
        {},
        h("i", { class: `swatch line-${line.id}` }),
        `${line.name} `,
        h("b", { text: value === null ? "–" : this.format(value) }),
      );
    });
    this.note.replaceChildren(h("time", { text: clock(time) }), ...values);
    this.note.style.setProperty(
      "left",
      `${Math.max(PAD.left, Math.min(x + 10, this.width - 150))}px`,
    );
  }
}
