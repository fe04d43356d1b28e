// Why rewards are zero or missing: a row chooses the rollouts that ended so.

function outcomeWords(one) { return [one.status, one.detail].filter(Boolean).join(": "); }

// The filter that a cause stands for.
function causeFilter(one) {
  return { environment: one.environment || null, status: one.status, detail: one.detail || null, why: one.zero ? one.why || null : null, reward: one.zero ? "zero" : "none" };
}

class CausePanel {
  constructor(view, open) {
    this.view = view;
    this.open = open; // called with a rollout's id
    this.element = make("div");
  }

  show(analysis) {
    const all = analysis.ends.reduce((sum, one) => sum + one.count, 0);
    const rows = analysis.ends.map((one) => this.row(one));
    const heads = ["Why", "Newest", "Rollouts", "Environment", "Ended as"];
    refillBox(this.element, make("div", {},
      make("p", { class: "dim sum" }, `${count(all)} of ${plural(analysis.finished, "finished rollout")}${analysis.finished ? `, ${percent(all / analysis.finished)}` : ""}`),
      table("Causes", heads, rows, analysis.finished ? "Every reward is above zero." : "Nothing has finished yet.")));
  }

  row(one) {
    const wanted = causeFilter(one);
    const chosen = Object.entries(wanted).every(([name, value]) => (this.view.values[name] ?? null) === value);
    const words = one.zero ? one.why || "no reason given" : outcomeWords(one);
    const choose = make("button", { type: "button", class: "link", "aria-pressed": chosen ? "true" : "false", title: one.why || words,
      onclick: () => this.view.set(chosen ? Object.fromEntries(Object.keys(wanted).map((name) => [name, null])) : { ...wanted, state: null }) }, words);
    const newest = make("button", { type: "button", class: "link", onclick: () => this.open(one.rollout_id) }, "open");
    const badge = one.zero ? make("b", { class: "badge bad" }, "0") : make("b", { class: "badge none" }, "none");
    const ended = [one.zero ? outcomeWords(one) : one.why, one.cause].filter(Boolean).join(", ");
    return [choose, newest, count(one.count), one.environment || "\u2013", make("span", {}, badge, ` ${ended}`)];
  }
}
