// Two rollouts side by side, turn by turn; what they have in common is shown once.

function turnsOf(rollout) {
  const turns = new Map();
  for (const message of rollout.messages) {
    if (!turns.has(message.turn)) turns.set(message.turn, []);
    turns.get(message.turn).push(message);
  }
  return turns;
}

class ComparisonView {
  constructor(host, left, right) {
    const view = new ConversationView(make("div"), []);
    const [a, b] = [left, right].map(turnsOf);
    const numbers = [...new Set([...a.keys(), ...b.keys()])].sort((x, y) => x - y);
    let different = null;
    const rows = numbers.map((number) => {
      const pair = [a.get(number) ?? [], b.get(number) ?? []];
      const same = JSON.stringify(pair[0]) === JSON.stringify(pair[1]);
      const row = make("section", { class: same ? "turn same" : "turn", "aria-label": number < 0 ? "Prompt" : `Turn ${number + 1}` },
        make("h2", { class: "section-title" }, number < 0 ? "Prompt" : `Turn ${number + 1}`, make("span", { class: "dim" }, same ? " the same in both" : different ? "" : " the first difference")));
      if (same) row.append(make("details", {}, make("summary", {}, plural(pair[0].length, "message")), ...pair[0].map((message) => view.article(message))));
      else row.append(make("div", { class: "pair" }, ...pair.map((messages, side) => make("div", { class: "side", "aria-label": side ? "Right" : "Left", role: "group" },
        ...(messages.length ? messages.map((message) => view.article(message)) : [make("p", { class: "dim" }, "It has no such turn.")])))));
      if (!same) different ??= row;
      return row;
    });
    const jump = make("button", { type: "button", onclick: () => different.scrollIntoView({ block: "start" }) }, "To the first difference");
    host.replaceChildren(make("div", { class: "pair heads" }, ...[left, right].map((one) => this.head(one))),
      different ? make("p", {}, jump) : make("p", { class: "dim" }, "All turns are the same."), ...rows, ...this.graded(left, right));
  }

  head(rollout) {
    return make("div", { class: "side message" }, make("h2", {}, rollout.title), make("p", { class: "verdict" }, make("b", { class: `badge ${rollout.mood}` }, rollout.verdict), " ", rollout.outcome),
      rollout.why ? make("p", { class: "reason" }, rollout.why) : null, answers(rollout.graded), rollout.message ? make("p", { class: "trouble" }, rollout.message) : null);
  }

  graded(left, right) {
    if (!left.graded.length && !right.graded.length) return [];
    return [make("section", { class: "turn", "aria-label": "What was graded" }, make("h2", { class: "section-title" }, "What was graded"),
      make("div", { class: "pair" }, ...[left, right].map((one) => make("div", { class: "side" }, ...one.graded.map(gradedPart)))))];
  }
}
