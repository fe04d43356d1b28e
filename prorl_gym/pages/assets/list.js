// The list of rollouts: finished, running or waiting ones, sorted by a column.

const STATES = ["finished", "running", "waiting"];
const SPREAD_NAMES = { waited: ["Waited to begin", seconds], took: ["Took", seconds], turns: ["Turns", count], tokens: ["Tokens", figure] };

class RolloutList {
  constructor(view, open) {
    this.view = view;
    this.service = null;
    this.shown = ""; // which list it is
    this.rows = new RowList(byId("rows"), (one) => open(one.rollout_id), (column) => this.sort(column));
    this.tabs = STATES.map((state) => make("button", { type: "button", onclick: () => view.set({ state: state === "finished" ? null : state, sort: null, up: null }) }, state));
    byId("states").append(...this.tabs);
    this.order = make("select", { "aria-label": "Sort by", onchange: () => this.sort(this.order.value) });
    byId("order").append(this.order);
  }

  get state() { return STATES.includes(this.view.values.state) ? this.view.values.state : "finished"; }
  get columns() { return this.state === "finished" ? FINISHED_COLUMNS : PENDING_COLUMNS; }

  // What to ask the service for.
  get query() {
    const asked = this.view.values.sort ?? "";
    const sort = this.columns.some(([, , , column]) => column === asked) ? asked : this.state === "finished" ? "finished" : "took";
    return { ...this.view.filter, state: this.state, sort, descending: !("up" in this.view.values), limit: PAGE };
  }

  sort(column) {
    const { sort, descending } = this.query;
    const up = column === sort ? descending : false;
    this.view.set({ sort: column, up: up ? "1" : null });
  }

  async look() {
    const { service, query } = this, key = JSON.stringify(query);
    const pick = (answer) => (query.state === "finished" ? answer.rollouts : answer.pending);
    const answer = await service.rollouts(query);
    if (service !== this.service || key !== JSON.stringify(this.query)) return null; // something else is asked for by now
    if (key !== this.shown) this.rows.reset(this.columns, async (offset) => pick(await service.rollouts({ ...query, offset })), { sort: query.sort, up: !query.descending, kind: query.state === "finished" ? "" : "pending" });
    this.shown = key;
    this.rows.refresh(answer.counts[query.state], pick(answer));
    this.tabs.forEach((tab, i) => {
      tab.textContent = `${count(answer.counts[STATES[i]])} ${STATES[i]}`;
      tab.setAttribute("aria-pressed", STATES[i] === query.state);
    });
    options(this.order, null, this.columns.filter(([, , , column]) => column).map(([name, , , column]) => [column, `by ${name.toLowerCase()}`]));
    this.order.value = query.sort;
    return answer.counts;
  }

  // Ages of what is pending, by their rank among all that match.
  async spreads(counts) {
    const number = counts[this.state];
    if (this.state === "finished" || !number) return {};
    const at = async (share) => (await this.service.rollouts({ ...this.query, sort: "took", descending: true, limit: 1, offset: Math.min(Math.floor(number * share), number - 1) })).pending[0];
    const [max, p90, p50] = await Promise.all([0, 0.1, 0.5].map(at));
    const old = (one) => one ? Math.max(Date.now() / 1000 - one.accepted_at, 0) : 0;
    return { accepted: { p50: old(p50), p90: old(p90), max: old(max) } };
  }

  showSpreads(spreads) {
    const names = { ...SPREAD_NAMES, accepted: ["Accepted for", seconds] };
    const cells = Object.entries(names).filter(([name]) => spreads[name]).map(([name, [words, show]]) => make("div", {}, make("dt", {}, words),
      make("dd", {}, ...["p50", "p90", "max"].flatMap((part) => [make("span", { class: "dim" }, `${part} `), `${show(spreads[name][part])} `]))));
    byId("spreads").replaceChildren(...cells);
  }
}
