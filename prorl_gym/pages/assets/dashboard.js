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

let service = null, version = null, timer = 0, held = false, looking = false, wanted = false, tallied = null;
const charts = LINES.map(([title, unit]) => new Chart(title, unit));
const engineChart = new Chart("Engines", "calls in flight");
const view = new View(show);
const open = (rollout, beside = null) => view.set({ rollout, beside });
const rewards = new RewardPanel(view);
const causes = new CausePanel(view, open);
const problems = new ProblemPanel(view, open);
const list = new RolloutList(view, open);
const viewer = new Viewer(() => view.set({ rollout: null, beside: null }));

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
  list.service = viewer.service = service;
  byId("door").hidden = true;
  byId("board").hidden = false;
  for (const id of ["pause", "leave"]) byId(id).hidden = false;
  show(null);
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
  byId("board").setAttribute("aria-busy", "true");
  const asked = service;
  try {
    const [status, past, counts] = await Promise.all([asked.status(), asked.history(), lookAtRollouts(asked)]);
    if (asked !== service) return;
    showStatus(status, past, counts);
    await showGroups();
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
    const soon = wanted || asked !== service;
    wanted = false;
    byId("board").setAttribute("aria-busy", String(soon));
    if (service && (soon || (!held && !document.hidden))) timer = setTimeout(look, soon ? 0 : SECONDS * 1000);
  }
}

// What the view chooses: rewards and causes of its scope, problems and rollouts of its whole filter.
async function lookAtRollouts(asked) {
  const { scope, filter } = view, narrow = JSON.stringify(scope) !== JSON.stringify(filter);
  const [analysis, narrowed, found, counts, every] = await Promise.all([
    asked.analysis(scope), narrow ? asked.analysis(filter) : null, asked.problems({ ...filter, order: view.values.order ?? "worst", limit: problems.limit }),
    list.look(), Object.keys(filter).length ? asked.rollouts({ limit: 1 }) : null,
  ]);
  if (asked !== service) return null;
  if (JSON.stringify(filter) === JSON.stringify(view.filter)) {
    showFilters(analysis);
    rewards.show(analysis.rewards);
    causes.show(analysis);
    problems.show(found);
    if (counts) list.showSpreads(list.state === "finished" ? (narrowed ?? analysis).spreads : await list.spreads(counts));
  }
  return every?.counts ?? counts;
}

// The view has changed: what only its rollout changes needs no new answers.
function show(before) {
  const { rollout, beside } = view.values;
  const form = byId("filters");
  for (const name of ["evaluation", "reward", "text"]) if (form.elements[name] !== document.activeElement) form.elements[name].value = view.values[name] ?? "";
  byId("problem-order").value = view.values.order ?? "worst";
  if (!service) return;
  if (rollout) viewer.open(rollout, beside ?? ""); else viewer.close();
  if (!before || JSON.stringify({ ...before, rollout, beside }) !== JSON.stringify({ ...view.values, rollout, beside })) again();
}

function again() {
  if (looking) wanted = true; else look();
}

function showStatus(status, past, counts) {
  version ??= status.version;
  if (status.version !== version) location.reload(); // another release: its pages have programs that this one does not let run
  setHealth(status.problem || !status.ready ? "bad" : "good", !status.ready ? "not ready" : status.problem ? status.problem.split(":")[0] : "ready");
  byId("trouble").textContent = status.problem ?? "";
  byId("trouble").hidden = !status.problem;
  byId("about").textContent = [status.version && `version ${status.version}`, status.uptime_seconds && `up ${lasting(status.uptime_seconds)}`].filter(Boolean).join(", ");
  const latest = Object.fromEntries(Object.entries(past.columns).map(([name, values]) => [name, values.at(-1)]));
  byId("tiles").replaceChildren(...tiles(status, latest, counts ?? tallied, (state) => { view.set({ state: state === "finished" ? null : state, sort: null, up: null }); byId("list").scrollIntoView(); }));
  tallied = counts ?? tallied;
  LINES.forEach(([, , names], i) => {
    const lines = Object.entries(names).filter(([, column]) => past.columns[column]).map(([name, column]) => ({ name, values: past.columns[column] }));
    charts[i].show(past.times, lines);
    charts[i].element.hidden = past.times.length && !lines.length;
  });
  const engines = Object.keys(past.columns).filter((name) => /^engine\..*\.in_flight$/.test(name));
  engineChart.show(past.times, engines.map((name) => ({ name: name.slice("engine.".length, -".in_flight".length), values: past.columns[name] })));
  engineChart.element.hidden = !engines.length;
  refill("mismatches", mismatchTable(status));
  refill("engines", engineTable(status));
  byId("pools").textContent = (status.pools ?? []).map((pool) => `${pool.name}: version ${pool.version}${pool.paused ? ", paused" : ""}, ${plural(pool.failovers, "failover")}${pool.unavailable_reason ? `, ${plural(pool.waiting_rollouts, "rollout")} waiting: ${pool.unavailable_reason}` : ""}`).join("; ");
}

function showFilters(analysis) {
  const form = byId("filters");
  options(form.elements.run, "all runs", within(analysis.runs, "run"));
  options(form.elements.environment, "all environments", within([...analysis.environments].sort(), "environment"));
  for (const name of ["run", "environment"]) form.elements[name].value = view.values[name] ?? "";
  const shown = ["problem", "status", "detail", "why", "version"].filter((name) => name in view.values);
  byId("chosen").replaceChildren(...shown.map((name) => make("button", { type: "button", class: "choice", "aria-label": `Take away: ${name} ${view.values[name]}`, onclick: () => view.set({ [name]: null }) },
    make("span", { class: "dim" }, `${name} `), view.values[name], " \u00d7")));
  if (Object.keys(view.filter).length) byId("chosen").append(make("button", { type: "button", onclick: () => view.set(Object.fromEntries([...SCOPE, ...NARROWING].map((name) => [name, null]))) }, "Show all"));
  options(byId("group-run"), null, analysis.runs);
}

const within = (names, name) => (name in view.values && !names.includes(view.values[name]) ? [...names, view.values[name]] : names);

byId("charts").append(...charts.map((chart) => chart.element), engineChart.element);
byId("versions").append(rewards.element);
byId("causes").append(causes.element);
byId("problems").append(problems.element);
problems.onMore = again;
byId("problem-order").addEventListener("change", (event) => view.set({ order: event.target.value === "worst" ? null : event.target.value }));
byId("filters").addEventListener("input", (event) => view.set({ [event.target.name]: event.target.value }, { typed: event.target.name === "text" }));
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

const token = knownToken();
if (token) enter(token); else showDoor();
