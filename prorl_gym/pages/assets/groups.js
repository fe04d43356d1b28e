// The groups of a run: decided, undecided, dropped; and what stopping cost and saved.

const GROUP_STATES = {
  ready: ["decided", "rewards differ, complete"], uninformative: ["decided", "rewards are alike"], informative: ["undecided", "rewards differ, not complete"],
  open: ["undecided", "nothing is decided"], redundant: ["dropped", "not needed any more"], stale: ["dropped", "too far behind the policy"], short: ["dropped", "rewards are missing"],
};

function groupPanel(status) {
  if (!status.demand) return make("p", { class: "dim" }, "The run has no demand: every rollout is made to its end, and groups are not counted.");
  const states = Object.entries(GROUP_STATES).map(([name, [kind, words]]) => [name, kind, words, status.states[name] ?? 0]);
  const total = states.reduce((sum, [, , , number]) => sum + number, 0);
  const rows = states.map(([name, kind, words, number]) => [`${kind}: ${name}`, count(number),
    meter(total ? number / total : 0, percent(total ? number / total : 0)), make("span", { class: "dim" }, words)]);
  const pairs = [
    ["Ready and fresh", `${count(status.ready)} of ${count(status.wanted)} wanted`], ["Begun, not used", count(status.begun)], ["Not begun", count(status.waiting + status.kept)],
    ["Rollouts held", count(status.held)], ["Parked", count(status.parked)], ["Replaced", count(status.replaced)], ["Racing stragglers", count(status.extras)],
    ["Tokens wasted", figure(status.wasted_tokens)], ["Agent time saved", lasting(status.reclaimed_seconds)],
  ];
  return make("div", {}, table("Groups by state", ["Groups", "Number", "Share", "Because"], rows, ""),
    make("dl", { class: "pairs" }, ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
}

async function showGroups() {
  const run = byId("group-run").value;
  refill("groups", run ? groupPanel(await service.groups(run)) : make("p", { class: "dim" }, "No run has finished a rollout yet."));
}
