// The dashboard: looks at the service every few seconds while somebody looks at it.

const SECONDS = 5;
const LINES = [
  ["Stage occupancy", "rollouts", { INIT: "init", RUN: "run", EVAL: "eval", parked: "parked" }],
  ["Queues", "rollouts", { "in the ledger": "queued", "at the runner": "runner_queue" }],
  ["Throughput", "rollouts/s", { finished: "finished_per_second" }],
  ["Tokens", "per second", { sampled: "tokens_per_second" }],
  ["Mean reward", "of what finished", { reward: "mean_reward" }],
  ["Mismatch", "of log-probs, nats", { largest: "mismatch_max_abs_diff", KL: "mismatch_kl" }],
];

let service = null, newest = null, version = null, timer = 0, held = false, looking = false;
const charts = LINES.map(([title, unit]) => new Chart(title, unit));
const engineChart = new Chart("Engines", "calls in flight");
const list = new RowList(byId("rows"), (one) => viewer.open(one.rollout_id));
let viewer = null;

function showDoor(why = "") {
  clearTimeout(timer);
  service = null;
  byId("board").hidden = true;
  byId("door").hidden = false;
  for (const id of ["pause", "leave"]) byId(id).hidden = true;
  byId("refused").hidden = !why;
  byId("refused").textContent = why;
  setHealth("none", "not connected");
  byId("given").focus();
}

function enter(token) {
  service = new Service(token);
  newest = new Newest(service);
  if (viewer) viewer.service = service; else viewer = new Viewer(service);
  byId("door").hidden = true;
  byId("board").hidden = false;
  for (const id of ["pause", "leave"]) byId(id).hidden = false;
  look();
}

function setHealth(mood, words) {
  byId("health").className = `badge ${mood}`;
  byId("health").textContent = words;
}

// One look after the other, never two at once.
async function look() {
  clearTimeout(timer);
  if (!service || looking) return;
  looking = true;
  const asked = service;
  try {
    const [status, past] = await Promise.all([asked.status(), asked.history()]);
    if (asked !== service) return;
    showStatus(status, past);
    const first = !newest.all.length;
    await newest.refresh();
    showList();
    await showGroups();
    if (first) fillUp(newest);
  } catch (error) {
    if (error.status === 401) {
      sessionStorage.removeItem(TOKEN);
      showDoor(error.message);
    } else if (error instanceof Refused) {
      setHealth("bad", "no answer");
      byId("trouble").textContent = error.message;
      byId("trouble").hidden = false;
    } else throw error;
  } finally {
    looking = false;
    if (service && !held && !document.hidden) timer = setTimeout(look, asked === service ? SECONDS * 1000 : 0);
  }
}

async function fillUp(rollouts) {
  try {
    while (rollouts === newest && await rollouts.older()) showList();
  } catch (error) {
    if (!(error instanceof Refused)) throw error; // the next look tells what is wrong
  }
  showList();
}

function showStatus(status, past) {
  version ??= status.version;
  if (status.version !== version) location.reload(); // another release: its pages have programs that this one does not let run
  setHealth(status.problem || !status.ready ? "bad" : "good", !status.ready ? "not ready" : status.problem ? status.problem.split(":")[0] : "ready");
  byId("trouble").textContent = status.problem ?? "";
  byId("trouble").hidden = !status.problem;
  byId("about").textContent = [status.version && `version ${status.version}`, status.uptime_seconds && `up ${lasting(status.uptime_seconds)}`].filter(Boolean).join(", ");
  const latest = Object.fromEntries(Object.entries(past.columns).map(([name, values]) => [name, values.at(-1)]));
  byId("tiles").replaceChildren(...tiles(status, latest));
  LINES.forEach(([, , names], i) => {
    const lines = Object.entries(names).filter(([, column]) => past.columns[column]).map(([name, column]) => ({ name, values: past.columns[column] }));
    charts[i].show(past.times, lines);
    charts[i].element.hidden = past.times.length && !lines.length;
  });
  const engines = Object.keys(past.columns).filter((name) => /^engine\..*\.in_flight$/.test(name));
  engineChart.show(past.times, engines.map((name) => ({ name: name.slice("engine.".length, -".in_flight".length), values: past.columns[name] })));
  engineChart.element.hidden = !engines.length;
  refill("rewards", rewardTable(status));
  refill("mismatches", mismatchTable(status));
  refill("ends", endTable(status));
  refill("engines", engineTable(status));
  byId("pools").textContent = (status.pools ?? []).map((pool) => `${pool.name}: version ${pool.version}${pool.paused ? ", paused" : ""}, ${plural(pool.failovers, "failover")}${pool.unavailable_reason ? `, ${plural(pool.waiting_rollouts, "rollout")} waiting: ${pool.unavailable_reason}` : ""}`).join("; ");
}

// Put a new table in the place of the old one, which may be scrolled or have the focus.
function refill(id, fresh) {
  const old = byId(id).firstElementChild;
  const [top, left, focused] = [old?.scrollTop ?? 0, old?.scrollLeft ?? 0, old !== null && old === document.activeElement];
  byId(id).replaceChildren(fresh);
  [fresh.scrollTop, fresh.scrollLeft] = [top, left];
  if (focused) fresh.focus();
}

function showList() {
  const form = byId("filters");
  const runs = newest.values("run_id");
  options(form.elements.run, "all runs", runs);
  options(form.elements.environment, "all environments", newest.values("environment").sort());
  options(form.elements.status, "all outcomes", newest.values("status").sort());
  const chosen = newest.matching(Object.fromEntries(new FormData(form)));
  list.show(chosen);
  const all = count(newest.all.length);
  byId("shown").textContent = chosen.length === newest.all.length ? `the newest ${all}` : `${count(chosen.length)} of the newest ${all}`;
  options(byId("group-run"), null, runs);
}

function options(select, all, values) {
  const wanted = [...(all === null ? [] : [["", all]]), ...values.map((value) => [value, value])];
  if (wanted.length === select.options.length && wanted.every(([value], i) => select.options[i].value === value)) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map(([value, name]) => make("option", { value }, name)));
  if (values.includes(chosen)) select.value = chosen;
}

byId("charts").append(...charts.map((chart) => chart.element), engineChart.element);
byId("filters").addEventListener("input", showList);
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("group-run").addEventListener("change", () => look());
byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("given").value.trim());
  byId("given").value = "";
  enter(knownToken());
});
byId("leave").addEventListener("click", () => { sessionStorage.removeItem(TOKEN); showDoor(); });
byId("pause").addEventListener("click", () => {
  held = !held;
  byId("pause").setAttribute("aria-pressed", held);
  look();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !held) look(); });

const asked = new URLSearchParams(location.hash.slice(1)).get("rollout");
const token = knownToken();
if (token) enter(token); else showDoor();
if (token && asked) viewer.open(asked);
