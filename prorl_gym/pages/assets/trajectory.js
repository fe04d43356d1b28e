// The trajectory page: one rollout, one of several chosen from an overview, or two of them side by side.

const data = JSON.parse(byId("data").textContent);
const LEGENDS = {
  mask: [["s", "1: sampled by the policy"], ["", "0: prompt, observation, template"]],
  logprob: ["p \u2265 0.9", "p \u2265 0.5", "p \u2265 0.1", "p \u2265 0.01", "p < 0.01"].map((name, i) => [`s p${i}`, name]),
};

const VIEWS = ["conversation", "tokens", "graded", "comparison"];

let tokens = null, conversation = null, search = null, turn = -1, hits = [], hit = -1, last = "", compared = null;

function showRollout(rollout) {
  const segments = rollout.segments.map((packed) => new Segment(packed, data));
  showSummary(rollout);
  conversation = new ConversationView(byId("conversation"), rollout.messages);
  tokens = { segments, view: null, rollout };
  search = new TokenSearch(segments);
  [turn, hits, hit, last] = [-1, [], -1, ""];
  byId("found").textContent = "";
  byId("stream").replaceChildren();
  const turns = Math.max(-1, ...rollout.messages.map((one) => one.turn), ...segments.flatMap((one) => one.calls.map((call) => call.turn))) + 1;
  byId("turn").replaceChildren(make("option", { value: -1 }, turns ? `${plural(turns, "turn")}` : "no turn"),
    ...Array.from({ length: turns }, (_, i) => make("option", { value: i }, `Turn ${i + 1} of ${turns}`)));
  byId("tools").hidden = false;
  byId("graded").replaceChildren(...gradedParts(rollout.graded));
  byId("show-graded").hidden = !rollout.graded.length;
  offerOthers(rollout);
  describeToken(null);
  if (!byId("tokens").hidden) showView("tokens");
  else if (!byId("comparison").hidden) showView("comparison");
  else if (!byId("graded").hidden && !rollout.graded.length) showView("conversation");
}

// The rollouts that one can be compared with, those of its own problem first.
function offerOthers(rollout) {
  const others = data.rollouts.map((one, number) => ({ one, number })).filter(({ one }) => one !== rollout);
  const alike = ({ one }) => one.problem === rollout.problem && one.environment === rollout.environment;
  others.sort((a, b) => alike(b) - alike(a) || a.number - b.number);
  byId("show-comparison").hidden = !others.length;
  byId("beside").replaceChildren(...others.map(({ one, number }) => make("option", { value: number }, `${one.title}: ${one.verdict}`)));
  const contrast = others.find((other) => alike(other) && other.one.mood !== rollout.mood) ?? others[0];
  if (contrast) byId("beside").value = contrast.number;
  compared = null;
}

function showComparison() {
  const other = data.rollouts[Number(byId("beside").value)];
  if (compared !== other) new ComparisonView(byId("comparison"), tokens.rollout, other);
  compared = other;
}

function showSummary(rollout) {
  byId("summary").replaceChildren(make("div", {},
    make("h1", {}, rollout.title),
    make("p", { class: "verdict" }, make("b", { class: `badge ${rollout.mood}` }, rollout.verdict), " ", rollout.outcome),
    rollout.why ? make("p", { class: "reason" }, rollout.why) : null,
    answers(rollout.graded),
    rollout.message ? make("p", { class: "trouble" }, rollout.message) : null,
    stageTimeline(rollout.stages),
    make("details", { class: "facts", open: matchMedia("(min-width: 60rem)").matches },
      make("summary", {}, "Facts"),
      make("dl", {}, ...rollout.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))))),
  ));
}

function showAll() {
  const overview = new Overview(byId("index"), data.rollouts);
  const choose = () => {
    const chosen = Number(/^#r(\d+)$/.exec(location.hash)?.[1] ?? -1);
    overview.mark(chosen);
    byId("summary").hidden = byId("tools").hidden = !(chosen in data.rollouts);
    if (!(chosen in data.rollouts)) return VIEWS.forEach((name) => { byId(name).hidden = true; });
    showRollout(data.rollouts[chosen]);
    if (VIEWS.every((name) => byId(name).hidden)) showView("conversation");
    byId("summary").scrollIntoView({ block: "start" });
  };
  addEventListener("hashchange", choose);
  choose();
}

function showView(name) {
  for (const one of VIEWS) {
    byId(one).hidden = one !== name;
    byId(`show-${one}`).setAttribute("aria-pressed", one === name);
  }
  const isTokens = name === "tokens";
  byId("other").hidden = name !== "comparison";
  for (const id of ["turns", "search"]) byId(id).hidden = name === "graded" || name === "comparison";
  if (name === "comparison") return showComparison();
  if (name === "graded") return;
  [hits, hit, last] = [[], -1, ""];
  byId("found").textContent = "";
  if (isTokens && !tokens.view) {
    const fresh = byId("stream").cloneNode(false); // without the listeners of the rollout before
    byId("stream").replaceWith(fresh);
    tokens.view = new TokenView(fresh, tokens.segments, describeToken);
    if (!tokens.segments.some((one) => one.length)) fresh.append(make("p", { class: "dim" }, "No tokens were recorded."));
    showLegend();
  }
  if (turn >= 0) goToTurn(turn);
}

function showLegend() {
  const colour = byId("stream").dataset.colour;
  const versions = tokens.view?.versions ?? [];
  const entries = LEGENDS[colour] ?? versions.slice(0, 24).map((version, i) => [`s v${i % 6}`, version < 0 ? "not recorded" : `version ${version}`]);
  byId("legend").replaceChildren(...entries.map(([look, name]) => make("li", {}, make("span", { class: `t ${look}` }, "token"), ` ${name}`)));
  byId("legend").dataset.colour = colour;
}

function describeToken(segment, position, keyboard) {
  const box = byId("token");
  if (!segment) return box.replaceChildren(make("div", {}, make("dt", {}, "Token"), make("dd", {}, "none chosen")));
  const size = segment.size(position), positions = Array.from({ length: size }, (_, i) => position + i);
  const call = segment.call(position);
  const sampled = segment.sampled(position);
  const facts = [
    ["Text", data.texts ? JSON.stringify(segment.text(position)) : "no tokenizer"],
    [size > 1 ? "Ids" : "Id", positions.map((i) => segment.id(i)).join(", ")],
    ["Log-prob", sampled ? positions.map((i) => `${segment.logprob(i)}`).join(", ") : "not sampled"],
    ["Probability", sampled ? positions.map((i) => `${(100 * Math.exp(segment.logprob(i))).toPrecision(3)} %`).join(", ") : "\u2013"],
    ["Policy version", sampled && segment.version(position) >= 0 ? `${segment.version(position)}` : "\u2013"],
    ["Turn", call ? `${call.turn + 1}` : "given"],
    ["Position", tokens.segments.length > 1 ? `${count(position)} in segment ${tokens.segments.indexOf(segment) + 1}` : count(position)],
  ];
  const spare = ["Probability", "Position"]; // left out where there is little room
  box.replaceChildren(...facts.map(([name, value]) => make("div", { class: spare.includes(name) && "spare" }, make("dt", {}, name), make("dd", {}, value))));
  if (call && call.turn !== turn) setTurn(call.turn);
  if (keyboard) byId("announce").textContent = facts.slice(0, 3).map(([name, value]) => `${name} ${value}`).join(", ");
}

function setTurn(number) {
  turn = number;
  byId("turn").value = number;
}

function goToTurn(number) {
  const last = byId("turn").options.length - 2;
  setTurn(Math.min(Math.max(number, 0), last));
  if (turn < 0) return;
  if (byId("tokens").hidden) conversation.goToTurn(turn);
  else tokens.view.goToTurn(turn);
}

function searchNext() {
  const wanted = byId("wanted").value.toLowerCase();
  const isTokens = !byId("tokens").hidden;
  if (!wanted) return;
  if (wanted !== last) [hits, hit, last] = [isTokens ? search.find(wanted) : conversation.find(wanted), -1, wanted];
  const what = isTokens ? "place" : "message";
  if (!hits.length) return void (byId("found").textContent = "nothing found");
  hit = (hit + 1) % hits.length;
  byId("found").textContent = `${count(hit + 1)} of ${plural(hits.length, what)}`;
  if (isTokens) tokens.view.go(...hits[hit]);
  else conversation.show(hits[hit], wanted);
}

for (const name of VIEWS) byId(`show-${name}`).addEventListener("click", () => showView(name));
byId("beside").addEventListener("change", showComparison);
byId("previous-turn").addEventListener("click", () => goToTurn(turn - 1));
byId("next-turn").addEventListener("click", () => goToTurn(turn + 1));
byId("turn").addEventListener("change", (event) => { if (event.target.value >= 0) goToTurn(Number(event.target.value)); });
byId("search").addEventListener("submit", (event) => { event.preventDefault(); searchNext(); });
byId("colours").addEventListener("change", (event) => { byId("stream").dataset.colour = event.target.value; showLegend(); });

if (data.rollouts.length > 1 && !data.compare) showAll();
else if (data.rollouts.length) showRollout(data.rollouts[0]);
if (data.compare) showView("comparison");
