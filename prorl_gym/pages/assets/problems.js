// A row for each problem, with the rewards of its rollouts side by side. Two of them can be compared.

const PROBLEMS = 25; // rows that each "Show more" adds
const MOST_PROBLEMS = 200;

function rewardWords(one) {
  return one.reward === null ? `no reward, ${outcomeWords(one)}` : `reward ${figure(one.reward)}${one.masked ? ", masked" : ""}${one.reward > 0 ? "" : `, ${one.why || outcomeWords(one)}`}`;
}

const mood = (one) => one.reward === null || one.masked ? "none" : one.reward > 0 ? "good" : "bad";

class ProblemPanel {
  constructor(view, open) {
    this.view = view;
    this.open = open; // called with one or two ids
    this.limit = PROBLEMS;
    this.first = null; // of the two to compare
    this.rows = make("div");
    this.more = make("button", { type: "button", class: "more", onclick: () => { this.limit = Math.min(this.limit + PROBLEMS, MOST_PROBLEMS); this.onMore(); } }, "Show more");
    this.message = make("p", { class: "dim sum", role: "status" });
    this.element = make("div", {}, this.message, this.rows, this.more);
    this.onMore = () => {};
    this.pair = byId("pair");
    this.pair.addEventListener("click", () => { this.first = null; this.pair.setAttribute("aria-pressed", this.pair.getAttribute("aria-pressed") !== "true"); this.show(this.answer); });
  }

  get isOfAll() { return !NARROWING.some((name) => name in this.view.values); }
  get isPairing() { return this.pair.getAttribute("aria-pressed") === "true"; }

  show(answer) {
    this.answer = answer;
    if (!answer) return;
    // Among chosen rollouts, a problem without a solved one may be solved by others.
    const words = this.isOfAll ? [plural(answer.total, "problem"), answer.never_solved ? `${count(answer.never_solved)} never solved` : "", answer.always_solved ? `${count(answer.always_solved)} always solved` : ""]
      : [`${plural(answer.total, "problem")} of the rollouts that are chosen`];
    this.message.textContent = this.isPairing ? this.first ? "Choose the second rollout." : "Choose the first of two rollouts." : words.filter(Boolean).join(", ");
    refillBox(this.rows, table("Rewards by problem", ["Problem", "Environment", "Mean", "Solved", "Rewards"], answer.problems.map((one) => this.row(one)), "Nothing has finished yet."));
    this.more.hidden = answer.problems.length >= answer.total || this.limit >= MOST_PROBLEMS;
  }

  row(problem) {
    const chosen = this.view.values.problem === problem.problem;
    const name = make("button", { type: "button", class: "link", "aria-pressed": chosen ? "true" : "false", title: `${problem.run_id}: ${problem.problem}`,
      onclick: () => this.view.set({ problem: chosen ? null : problem.problem }) }, problem.problem);
    const verdict = !problem.rewarded ? "none" : problem.solved ? "good" : "bad";
    const mean = problem.mean === null ? make("span", { class: "dim" }, "none") : make("b", { class: `badge ${verdict}` }, problem.mean.toFixed(2));
    const solved = problem.rewarded && !problem.solved && this.isOfAll ? `never, of ${count(problem.rewarded)}` : `${count(problem.solved)} of ${count(problem.rewarded)}`;
    return [name, problem.environment, mean, solved, make("div", { class: "chips" }, ...this.chips(problem), this.contrast(problem))];
  }

  chips(problem) {
    const made = [];
    let version;
    for (const one of problem.members) {
      if (one.version !== version) made.push(make("span", { class: "dim group" }, one.version === null ? "\u2013" : `v${one.version}`));
      version = one.version;
      const label = `${problem.problem}, replica ${one.replica + 1}${one.version === null ? "" : `, version ${one.version}`}: ${rewardWords(one)}`;
      made.push(make("button", { type: "button", class: `chip ${mood(one)}`, title: label, "aria-label": label, "aria-pressed": one.rollout_id === this.first ? "true" : null,
        onclick: () => this.choose(one.rollout_id) }, one.reward === null ? "\u2013" : figure(one.reward)));
    }
    if (problem.count > problem.members.length) made.push(make("span", { class: "dim" }, `and ${count(problem.count - problem.members.length)} older`));
    return made;
  }

  // The newest two whose rewards differ most.
  contrast(problem) {
    const scored = problem.members.filter((one) => one.reward !== null);
    const last = scored.filter((one) => one.version === scored.at(-1)?.version);
    const [worst, best] = [last, scored].map((among) => [...among].sort((a, b) => a.reward - b.reward)).map((sorted) => [sorted[0], sorted.at(-1)]).find(([low, high]) => low && low.reward < high.reward) ?? [];
    if (!worst) return null;
    return make("button", { type: "button", class: "link compare", "aria-label": `Compare the worst and the best rollout of ${problem.problem}`, onclick: () => this.open(worst.rollout_id, best.rollout_id) }, "compare");
  }

  choose(id) {
    if (!this.isPairing) return this.open(id);
    if (!this.first || this.first === id) {
      this.first = this.first === id ? null : id;
      return this.show(this.answer);
    }
    const first = this.first;
    this.first = null;
    this.pair.setAttribute("aria-pressed", "false");
    this.show(this.answer);
    this.open(first, id);
  }
}
