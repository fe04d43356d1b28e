// Curves over time, or over policy versions. Each line has a dash pattern of its own beside its colour, and the pointer or the arrow keys tell
// every value at one time.

const WIDTH = 600, HEIGHT = 120;
const MOST_LINES = 6;

function figure(value) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(1);
  return Number.isInteger(value) ? count(value) : value.toFixed(size >= 100 ? 0 : size >= 1 ? 1 : 3);
}

function clock(unix) { return new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" }); }

class Chart {
  constructor(title, unit = "") {
    this.title = title;
    this.unit = unit;
    this.at = null;
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.plot = make("div", { class: "plot", role: "slider", tabindex: 0, "aria-label": `${title}: ${this.axis}`, "aria-valuemin": 0 }, this.svg);
    this.top = make("span", { class: "top" });
    this.from = make("span");
    this.until = make("span", {}, "now");
    this.readout = make("ul", { class: "readout" });
    this.element = make("figure", { class: "card chart" }, make("h2", {}, title, make("span", { class: "dim" }, unit && ` ${unit}`)),
      this.top, this.plot, make("div", { class: "times" }, this.from, this.until), this.readout);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.choose(null));
    this.plot.addEventListener("blur", () => this.choose(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.show([], []);
  }

  get axis() { return "time"; }
  place(i) { return clock(this.times[i]); } // how a place on the axis is called

  // lines: [{name, values}]
  show(times, lines) {
    this.times = times;
    this.lines = lines.slice(0, MOST_LINES);
    this.left = lines.length - this.lines.length;
    const all = this.lines.flatMap((line) => line.values).filter((value) => value !== null);
    this.scale(all);
    this.from.textContent = times.length ? this.place(0) : "no samples yet";
    this.plot.setAttribute("aria-valuemax", Math.max(times.length - 1, 0));
    const middle = draw("line", { class: "middle", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 });
    this.cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg.replaceChildren(middle, ...this.lines.flatMap((line, i) => this.curve(line, i)), this.cursor);
    this.choose(this.at);
  }

  scale(all) {
    this.low = Math.min(0, ...all);
    const highest = Math.max(this.low, ...all);
    this.high = highest > this.low ? highest : this.low + 1; // a flat line lies at the foot
    this.top.textContent = all.length ? figure(this.high) : "";
  }

  x(i) { return this.times.length > 1 ? (i / (this.times.length - 1)) * WIDTH : WIDTH; }
  y(value) { return HEIGHT - 2 - ((value - this.low) / (this.high - this.low)) * (HEIGHT - 4); }

  curve(line, i) { return [draw("path", { class: `line c${i}`, d: this.path(line.values) })]; }

  path(values) {
    let drawn = "", down = false;
    values.forEach((value, i) => {
      if (value === null) return void (down = false);
      drawn += `${down ? "L" : "M"}${this.x(i).toFixed(1)} ${this.y(value).toFixed(1)}`;
      if (!down && (values[i + 1] ?? null) === null) drawn += "h2"; // alone: a dot
      down = true;
    });
    return drawn;
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    this.choose(Math.round(((event.clientX - box.left) / box.width) * (this.times.length - 1)));
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -60, PageDown: 60, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.choose((this.at ?? this.times.length - 1) + steps[event.key]);
  }

  choose(at) {
    const last = this.times.length - 1;
    this.at = at === null || last < 0 ? null : Math.min(Math.max(at, 0), last);
    const shown = this.at ?? last;
    this.cursor.setAttribute("visibility", this.at === null ? "hidden" : "visible");
    if (this.at !== null) for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, this.x(this.at));
    const values = this.lines.map((line) => figure(line.values[shown]));
    this.readout.replaceChildren(
      ...this.lines.map((line, i) => make("li", {}, lineSample(i), ` ${line.name} `, make("b", {}, values[i]))),
      ...(this.left > 0 ? [make("li", { class: "dim" }, `and ${this.left} more`)] : []),
      ...(this.at === null ? [] : [make("li", { class: "dim" }, `at ${this.place(this.at)}`)]));
    this.plot.setAttribute("aria-valuenow", Math.max(shown, 0));
    this.plot.setAttribute("aria-valuetext", shown < 0 ? "no samples yet" : `${this.place(shown)}: ${this.lines.map((line, i) => `${line.name} ${values[i]}`).join(", ")}`);
  }
}

function lineSample(i) {
  return draw("svg", { class: "sample", viewBox: "0 0 22 6", "aria-hidden": "true" }, draw("path", { class: `line c${i}`, d: "M0 3H22" }));
}
