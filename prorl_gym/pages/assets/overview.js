// All rollouts of a page: means by environment, a row of rewards for each problem, and a search through all of them.

class Overview {
  constructor(host, rollouts) {
    this.rollouts = rollouts;
    this.texts = null;
    this.only = make("input", { type: "checkbox", id: "only", onchange: () => this.filter() });
    this.wanted = make("input", { type: "search", "aria-label": "Search all rollouts", placeholder: "search all rollouts", oninput: () => this.filter() });
    this.found = make("output", { class: "dim", "aria-live": "polite" });
    this.rows = this.problems().map(([problem, members]) => this.row(problem, members));
    this.box = make("details", { open: true }, make("summary", {}, plural(rollouts.length, "rollout")), this.means(),
      make("p", { class: "narrow" }, this.wanted, make("label", {}, this.only, " only those without a reward above 0"), this.found),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Rewards by problem" }, make("table", {},
        make("thead", {}, make("tr", {}, ...["Problem", "Environment", "Mean", "Solved", "Rewards"].map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...this.rows.map((row) => row.element)))));
    this.title = make("h1", {}, "Rollouts");
    host.replaceChildren(this.title, this.box);
    host.hidden = false;
  }

  problems() {
    const found = new Map();
    this.rollouts.forEach((rollout, number) => {
      const key = JSON.stringify([rollout.environment, rollout.problem]);
      if (!found.has(key)) found.set(key, [rollout, []]);
      found.get(key)[1].push({ rollout, number });
    });
    return [...found.values()];
  }

  means() {
    const found = new Map();
    for (const { environment, reward } of this.rollouts) {
      const one = found.get(environment) ?? { rewards: [], missing: 0 };
      if (reward === null) one.missing += 1; else one.rewards.push(reward);
      found.set(environment, one);
    }
    return make("table", { class: "means" }, make("caption", { class: "hidden" }, "Mean reward by environment"),
      make("thead", {}, make("tr", {}, ...["Environment", "Mean reward", "Of 1", "Solved", "No reward"].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...[...found].map(([name, { rewards, missing }]) => {
        const mean = meanOf(rewards);
        return make("tr", {}, make("th", { scope: "row" }, name || "\u2013"), make("td", {}, mean === null ? "\u2013" : mean.toFixed(3)), make("td", {}, mean === null ? null : share(mean)),
          make("td", {}, `${count(rewards.filter((reward) => reward > 0).length)} of ${count(rewards.length)}`), make("td", {}, missing ? count(missing) : "\u2013"));
      })));
  }

  row({ environment, problem }, members) {
    const rewards = members.map(({ rollout }) => rollout.reward).filter((reward) => reward !== null), solved = rewards.filter((reward) => reward > 0).length;
    const mean = meanOf(rewards);
    const chips = members.map(({ rollout, number }) => make("a", { href: `#r${number}`, class: `chip ${rollout.mood}`, title: `${rollout.title}: ${rollout.verdict}, ${rollout.outcome}${rollout.why ? `, ${rollout.why}` : ""}`,
      "aria-label": `${rollout.title}: ${rollout.verdict}` }, rollout.reward === null ? "\u2013" : `${Number(rollout.reward.toPrecision(3))}`));
    const element = make("tr", {}, make("th", { scope: "row" }, problem), make("td", {}, environment),
      make("td", {}, make("b", { class: `badge ${mean === null ? "none" : solved ? "good" : "bad"}` }, mean === null ? "none" : mean.toFixed(2))),
      make("td", {}, rewards.length && !solved ? "never" : `${count(solved)} of ${count(rewards.length)}`), make("td", {}, make("div", { class: "chips" }, ...chips)));
    return { element, chips, numbers: members.map(({ number }) => number) };
  }

  // Everything that was said in a rollout, in small letters.
  text(number) {
    this.texts ??= this.rollouts.map((one) => [one.title, one.verdict, one.outcome, one.message, one.why, ...one.messages.flatMap((message) => [message.text, ...message.calls.flat()])].join("\n").toLowerCase());
    return this.texts[number];
  }

  filter() {
    const wanted = this.wanted.value.toLowerCase();
    let left = 0;
    for (const { element, chips, numbers } of this.rows) {
      numbers.forEach((number, i) => {
        const { reward } = this.rollouts[number];
        chips[i].hidden = (this.only.checked && reward !== null && reward > 0) || (wanted !== "" && !this.text(number).includes(wanted));
        left += chips[i].hidden ? 0 : 1;
      });
      element.hidden = chips.every((chip) => chip.hidden);
    }
    this.found.textContent = left === this.rollouts.length ? "" : `${count(left)} of ${plural(this.rollouts.length, "rollout")}`;
  }

  mark(chosen) {
    this.title.hidden = chosen in this.rollouts; // which has a title of its own
    for (const { chips, numbers } of this.rows) {
      chips.forEach((chip, i) => { if (numbers[i] === chosen) chip.setAttribute("aria-current", "true"); else chip.removeAttribute("aria-current"); });
    }
  }
}

const meanOf = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function share(value) {
  return draw("svg", { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": `${Math.round(100 * value)} % of 1` },
    draw("rect", { class: "rest", width: 100, height: 8 }), draw("rect", { class: "full", width: 100 * Math.min(Math.max(value, 0), 1), height: 8 }));
}
