// Reward by policy version, a line for each run and environment: dots are means, the line is smoothed.

const FEW_VERSIONS = 8; // up to here nothing is smoothed
const FEW_REWARDS = 5; // fewer say nothing about a change

class VersionChart extends Chart {
  get axis() { return "policy version"; }
  place(i) { return this.times[i] === null ? "no version" : `version ${this.times[i]}`; }

  show(versions, lines) {
    super.show(versions, lines);
    this.until.textContent = versions.length > 1 ? this.place(versions.length - 1) : "";
    if (!versions.length) this.from.textContent = "no rewards yet";
  }

  // From 0 to 1, and further only where rewards go further.
  scale(all) {
    this.low = Math.min(0, ...all);
    this.high = Math.max(1, ...all);
    this.top.textContent = "";
    this.plot.dataset.high = figure(this.high);
    this.plot.dataset.low = figure(this.low);
  }

  curve(line, i) {
    const dots = line.means.map((value, at) => value === null ? null : draw("path", { class: `dot d${i}`, d: `M${this.x(at).toFixed(1)} ${this.y(value).toFixed(1)}h.01` }));
    return [...super.curve(line, i), ...dots.filter(Boolean)];
  }
}

// Means over a window of versions, each counted as often as it has rewards; a line has no gaps.
function smoothed(points, versions) {
  const reach = versions.length <= FEW_VERSIONS ? 0 : Math.max(1, Math.round(versions.length / 15));
  const at = new Map(points.map((one) => [one.version, one]));
  return versions.map((_, i) => {
    const near = versions.slice(Math.max(i - reach, 0), i + reach + 1).map((version) => at.get(version)).filter(Boolean);
    const number = near.reduce((sum, one) => sum + one.count, 0);
    return number ? near.reduce((sum, one) => sum + one.mean * one.count, 0) / number : null;
  });
}

// A series for each run, environment and kind, those with the most rewards first.
function rewardSeries(points) {
  const series = new Map();
  for (const one of points) {
    const key = JSON.stringify([one.run_id, one.environment, one.evaluation]);
    if (!series.has(key)) series.set(key, { run: one.run_id, environment: one.environment, evaluation: one.evaluation, points: [], count: 0 });
    series.get(key).points.push(one);
    series.get(key).count += one.count;
  }
  const all = [...series.values()].sort((a, b) => b.count - a.count);
  const manyRuns = new Set(all.map((one) => one.run)).size > 1;
  for (const one of all) one.name = [manyRuns ? one.run : "", one.environment, one.evaluation ? "(evaluation)" : ""].filter(Boolean).join(" ");
  return all;
}

const byVersion = (a, b) => (a ?? -1) - (b ?? -1);

class RewardPanel {
  constructor(view) {
    this.view = view;
    this.chart = new VersionChart("Reward by policy version", "mean of what finished");
    this.from = make("select", { "aria-label": "From version" });
    this.to = make("select", { "aria-label": "To version" });
    this.between = make("p", { class: "between" }, make("label", {}, "From version ", this.from), make("label", {}, " to ", this.to));
    this.table = make("div");
    this.element = make("div", {}, this.chart.element, this.between, this.table);
    this.chart.element.classList.remove("card");
    this.chart.element.classList.add("scaled");
    for (const [name, select] of [["from", this.from], ["to", this.to]]) select.addEventListener("change", () => view.set({ [name]: select.value }));
  }

  show(points) {
    this.points = points;
    const series = rewardSeries(points);
    const versions = [...new Set(points.map((one) => one.version))].sort(byVersion);
    this.chart.show(versions, series.map((one) => ({ name: one.name, values: smoothed(one.points, versions), means: versions.map((version) => one.points.find((point) => point.version === version)?.mean ?? null) })));
    const names = versions.filter((version) => version !== null).map(String);
    this.between.hidden = names.length < 2;
    options(this.from, null, names);
    options(this.to, null, names);
    const { from, to } = this.view.values;
    const told = names.filter((name) => series[0].points.some((one) => `${one.version}` === name && one.count >= FEW_REWARDS)); // the newest version is often a few rollouts old
    if (names.length) [this.from.value, this.to.value] = [names.includes(from) ? from : told[0] ?? names[0], names.includes(to) ? to : told.at(-1) ?? names.at(-1)];
    const rows = series.map((one, i) => this.row(one, i, names.length > 1));
    const heads = names.length > 1 ? ["Rewards of", "Verdict", "Change", "From (n)", "To (n)"] : ["Rewards of", "Mean", "Of 1", "Rewards"];
    refillBox(this.table, table("Mean rewards by version", heads, rows, "Nothing with a reward has finished."));
  }

  row(series, i, many) {
    const name = make("span", {}, i < MOST_LINES ? lineSample(i) : null, ` ${series.name}`);
    if (!many) {
      const mean = series.points.reduce((sum, one) => sum + one.mean * one.count, 0) / series.count;
      return [name, mean.toFixed(3), meter(mean, `${percent(mean)} of 1`), count(series.count)];
    }
    const [from, to] = [this.from.value, this.to.value].map((version) => series.points.find((one) => `${one.version}` === version));
    const mean = (one) => one ? make("span", {}, one.mean.toFixed(3), " ", make("span", { class: "dim beside" }, `(${count(one.count)})`)) : "\u2013";
    return [name, ...change(from, to), mean(from), mean(to)];
  }
}

// The difference of two means, and whether it is larger than chance makes it: 1.96 standard errors.
function change(from, to) {
  if (!from || !to || from === to) return ["\u2013", "\u2013"];
  const difference = to.mean - from.mean;
  const error = 1.96 * Math.sqrt(from.deviation ** 2 / from.count + to.deviation ** 2 / to.count);
  const [mood, word] = Math.min(from.count, to.count) < FEW_REWARDS ? ["none", "too few"] : !difference && !error ? ["none", "no change"] : Math.abs(difference) <= error ? ["none", "not clear"] : difference > 0 ? ["good", "rose"] : ["bad", "fell"];
  return [make("b", { class: `badge ${mood}` }, word), make("span", { title: "with the interval of 95 %" }, `${difference < 0 ? "\u2212" : "+"}${Math.abs(difference).toFixed(3)} \u00b1 ${error.toFixed(3)}`)];
}
