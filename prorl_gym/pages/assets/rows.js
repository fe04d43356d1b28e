// A sorted list of tens of thousands of rollouts: pages of it are fetched, and elements made, for what is in sight.

const ROW = 34;
const SPARE = 8; // rows made above and below what is in sight
const PAGE = 100;

function rewardBadge(one) {
  if (one.reward === null) return make("span", { class: "dim" }, "none");
  return make("b", { class: `badge ${mood(one)}` }, `${figure(one.reward)}${one.masked ? " masked" : ""}`);
}

const age = (one) => seconds(Math.max(Date.now() / 1000 - one.accepted_at, 0));
const PLACES = {
  held: "held back by the demand", queue: "in the queue", retry: "pause before a retry", slot: "for a free slot", parked: "parked",
  init: "INIT", run: "RUN", eval: "EVAL", record: "its record is written",
};

// Heading, look, cell, and the column that the service sorts by.
const FINISHED_COLUMNS = [
  ["Rollout", "id", (one) => one.rollout_id, "rollout"], ["Problem", "problem", (one) => one.row_id, "problem"], ["Run", "run", (one) => one.run_id, "run"],
  ["Environment", "environment", (one) => one.environment, "environment"], ["Outcome", "outcome", outcomeWords, "outcome"], ["Reward", "reward", rewardBadge, "reward"],
  ["Why", "why", (one) => one.why, "why"], ["Turns", "turns", (one) => count(one.turns), "turns"], ["Tokens", "tokens", (one) => count(one.sampled_tokens), "tokens"],
  ["Version", "version", (one) => one.oldest_version ?? "\u2013", "version"],
  ["Waited", "waited", (one) => one.begun_at === null ? "\u2013" : seconds(Math.max(one.begun_at - one.accepted_at, 0)), "waited"], ["Took", "took", (one) => seconds(Math.max(one.finished_at - one.accepted_at, 0)), "took"],
  ["Finished", "finished", (one) => clock(one.finished_at), "finished"],
];
const PENDING_COLUMNS = [
  ["Rollout", "id", (one) => one.rollout_id, "rollout"], ["Problem", "problem", (one) => one.problem, "problem"], ["Run", "run", (one) => one.run_id, "run"],
  ["Environment", "environment", (one) => one.environment, "environment"], ["Where", "outcome", (one) => PLACES[one.place] ?? one.place],
  ["There for", "turns", (one) => one.since ? seconds(Math.max(Date.now() / 1000 - one.since, 0)) : "\u2013"],
  ["Attempt", "tokens", (one) => count(one.attempt)], ["Accepted for", "took", age, "took"],
];

class RowList {
  constructor(host, open, sort) {
    this.host = host;
    this.open = open; // called with a rollout
    this.sort = sort; // called with a column's name
    this.active = 0;
    this.key = null; // id of the active rollout
    this.reset([], async () => []);
    host.addEventListener("scroll", () => this.render());
    host.addEventListener("keydown", (event) => this.press(event));
    host.addEventListener("click", (event) => {
      const row = event.target.closest(".rows .row");
      if (row && this.at(row.number)) { this.choose(row.number); this.open(this.at(row.number)); }
    });
    new ResizeObserver(() => this.render()).observe(host);
  }

  // Show another list. ``fetch`` gives the rows from a place on, PAGE at most; it throws ``Refused``.
  reset(columns, fetch, { sort = "", up = false, kind = "" } = {}) {
    this.columns = columns;
    this.fetch = fetch;
    this.order = { sort, up };
    this.pages = new Map(); // by number: { rows, stale }
    this.asking = new Set();
    this.total = 0;
    const heads = columns.map(([name, look, , column]) => make("div", { role: "columnheader", class: `cell ${look}`, "aria-sort": column && column === sort ? (up ? "ascending" : "descending") : null },
      column ? make("button", { type: "button", class: "sort", tabindex: -1, onclick: () => this.sort(column) }, name) : name));
    this.body = make("div", { role: "rowgroup", class: `rows ${kind}` });
    this.host.replaceChildren(make("div", { role: "rowgroup", class: `heads ${kind}` }, make("div", { role: "row", class: "row", "aria-rowindex": 1 }, ...heads)), this.body);
    this.host.scrollTop = 0;
    [this.active, this.key] = [0, null];
  }

  // There may be new rows: what is in sight is fetched again, and shown as it was until it comes.
  refresh(total, first) {
    if (this.order.sort === "finished" && !this.order.up && this.key !== null) this.active += Math.max(total - this.total, 0); // what is new stands above it
    this.total = total;
    for (const page of this.pages.values()) page.stale = true;
    if (first) this.take(0, first);
    this.active = Math.min(this.active, Math.max(total - 1, 0));
    this.host.setAttribute("aria-rowcount", total + 1);
    this.body.style.setProperty("height", `${total * ROW}px`);
    this.render();
  }

  at(i) { return this.pages.get(Math.floor(i / PAGE))?.rows[i % PAGE] ?? null; }

  take(number, rows) {
    this.pages.set(number, { rows, stale: false });
    const found = this.key === null ? -1 : rows.findIndex((one) => one.rollout_id === this.key);
    if (found >= 0) this.active = number * PAGE + found;
  }

  async want(number) {
    const { fetch } = this;
    if (this.asking.has(number)) return;
    this.asking.add(number);
    try {
      const rows = await fetch(number * PAGE);
      if (fetch !== this.fetch) return;
      this.take(number, rows);
      this.asking.delete(number);
      this.render();
    } catch (error) {
      this.asking.delete(number); // the next look tells what is wrong, and asks again
      if (!(error instanceof Refused)) throw error;
    }
  }

  render() {
    const first = Math.max(Math.floor(this.host.scrollTop / ROW) - SPARE, 0);
    const last = Math.min(Math.ceil((this.host.scrollTop + this.host.clientHeight) / ROW) + SPARE, this.total);
    for (let number = Math.floor(first / PAGE); number * PAGE < last; number++) if (this.pages.get(number)?.stale !== false) this.want(number);
    const made = [];
    for (let i = first; i < last; i++) made.push(this.row(i));
    this.body.replaceChildren(...made);
    const active = byId(`row-${this.active}`);
    if (active) this.host.setAttribute("aria-activedescendant", active.id); else this.host.removeAttribute("aria-activedescendant");
  }

  row(i) {
    const one = this.at(i);
    const row = make("div", { role: "row", class: `row${i === this.active ? " active" : ""}`, id: `row-${i}`, "aria-rowindex": i + 2, "aria-selected": i === this.active ? "true" : "false" },
      ...this.columns.map(([, look, value]) => make("div", { role: "gridcell", class: `cell ${look}` }, one ? value(one) : "\u2026")));
    row.number = i;
    row.style.setProperty("top", `${i * ROW}px`);
    return row;
  }

  choose(i) {
    this.active = Math.min(Math.max(i, 0), Math.max(this.total - 1, 0));
    this.key = this.at(this.active)?.rollout_id ?? null;
    const top = this.active * ROW, height = this.host.clientHeight - ROW; // the head covers one row
    if (top < this.host.scrollTop) this.host.scrollTop = top;
    else if (top + ROW > this.host.scrollTop + height) this.host.scrollTop = top + ROW - height;
    this.render();
  }

  press(event) {
    if (event.target !== this.host) return;
    const page = Math.max(Math.floor(this.host.clientHeight / ROW) - 2, 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps) this.choose(this.active + steps[event.key]);
    else if (event.key === "Enter" && this.at(this.active)) this.open(this.at(this.active));
    else return;
    event.preventDefault();
  }
}
