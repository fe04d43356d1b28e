// Why rewards are zero or missing: a row for each reason, with the ways in which its rollouts ended. Both choose rollouts.

function outcomeWords(one) { return [one.status, one.detail].filter(Boolean).join(": "); }

const reasonOf = (one) => (one.zero ? one.why || "no reason given" : outcomeWords(one));

// The filters that a reason and one of its ends stand for.
function reasonFilter(one) {
  return one.zero ? { reward: "zero", why: one.why || null, status: null, detail: null } : { reward: "none", why: null, status: one.status, detail: one.detail || null };
}
const endFilter = (one) => ({ ...reasonFilter(one), environment: one.environment || null, status: one.status, detail: one.detail || null });

class CausePanel {
  constructor(view, open) {
    this.view = view;
    this.open = open; // called with a rollout's id
    this.element = make("div");
  }

  show(analysis) {
    const all = analysis.ends.reduce((sum, one) => sum + one.count, 0);
    const reasons = new Map();
    for (const one of analysis.ends) {
      const key = JSON.stringify([one.zero, reasonOf(one)]);
      reasons.set(key, [...(reasons.get(key) ?? []), one]);
    }
    const total = (ends) => ends.reduce((sum, one) => sum + one.count, 0);
    const rows = [...reasons.values()].sort((a, b) => total(b) - total(a)).map((ends) => this.row(ends, total(ends)));
    refillBox(this.element, make("div", {},
      make("p", { class: "dim sum" }, `${count(all)} of ${plural(analysis.finished, "finished rollout")}${analysis.finished ? `, ${percent(all / analysis.finished)}` : ""}`),
      table("Causes", ["Why", "Newest", "Rollouts", "Ended as"], rows, analysis.finished ? "Every reward is above zero." : "Nothing has finished yet.")));
  }

  row(ends, total) {
    const [newest] = ends, words = reasonOf(newest);
    const badge = newest.zero ? make("b", { class: "badge bad" }, "0") : make("b", { class: "badge none" }, "none");
    return [make("span", {}, badge, " ", this.choice(reasonFilter(newest), words)), make("button", { type: "button", class: "link", onclick: () => this.open(newest.rollout_id) }, "open"),
      count(total), make("div", { class: "ends" }, ...ends.map((one) => this.end(one)))];
  }

  end(one) {
    const ended = [one.zero ? outcomeWords(one) : one.why, one.cause].filter(Boolean).join(", ");
    return make("div", {}, this.choice(endFilter(one), [`${count(one.count)} ${one.environment || "without an environment"}`, ended].filter(Boolean).join(", ")));
  }

  choice(wanted, words) {
    const chosen = Object.entries(wanted).every(([name, value]) => (this.view.values[name] ?? null) === value);
    return make("button", { type: "button", class: "link", "aria-pressed": chosen ? "true" : "false", title: words,
      onclick: () => this.view.set(chosen ? Object.fromEntries(Object.keys(wanted).map((name) => [name, null])) : { ...wanted, state: null }) }, words);
  }
}
