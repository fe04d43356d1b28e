// What the status says, as tiles and tables.

function tile(name, value, note = "", look = "") {
  return make("div", { class: `tile ${look}` }, make("dt", {}, name), make("dd", {}, value, make("span", { class: "dim" }, note)));
}

function bytes(value) {
  const power = value > 0 ? Math.min(Math.floor(Math.log(value) / Math.log(1024)), 4) : 0;
  return `${(value / 1024 ** power).toFixed(power && value < 100 * 1024 ** power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function lasting(value) {
  const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.floor(value)} s`;
}

const percent = (share) => (share === null || share === undefined ? "\u2013" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);

// ``counts``: of all rollouts, as the list has them; ``choose`` is called with the state of a tile.
function tiles(status, latest, counts, choose) {
  const { capacity, ledger } = status;
  const inStages = capacity.init + capacity.run + capacity.eval;
  const engines = (status.pools ?? []).flatMap((pool) => pool.engines), serving = engines.filter(serves).length;
  const state = (name, note) => tile(make("button", { type: "button", class: "link", onclick: () => choose(name) }, name[0].toUpperCase() + name.slice(1)), counts ? count(counts[name]) : "\u2013", note);
  return [
    state("waiting", Object.entries(status.places ?? {}).filter(([place, number]) => number && !IN_STAGES.includes(place)).map(([place, number]) => `${count(number)} ${PLACES[place] ?? place}`).join(", ")),
    state("running", counts?.running > inStages ? `${count(inStages)} in a stage, ${count(counts.running - inStages)} for the next one` : ""),
    state("finished", latest.finished_per_second === undefined ? "" : `${figure(latest.finished_per_second)}/s`),
    tile(make("a", { href: "#engine-list", onclick: (event) => { event.preventDefault(); byId("engine-list").scrollIntoView(); byId("engine-list").focus(); } }, "Engines"), engines.length ? `${count(serving)} of ${count(engines.length)}` : "none",
      engines.length ? "serve" : "", engines.length && serving < engines.length ? "sick" : ""),
    tile("Tokens since start", figure(status.sampled_tokens ?? 0), latest.tokens_per_second === undefined ? "" : `${figure(latest.tokens_per_second)}/s`),
    tile("Tokens wasted", percent(status.sampled_tokens ? status.wasted_tokens / status.sampled_tokens : null), "no reward"),
    tile("Sandboxes", status.sandboxes === null || status.sandboxes === undefined ? "\u2013" : count(status.sandboxes)),
    tile("Ledger", ledger ? bytes(ledger.bytes) : "\u2013", ledger?.full ? "full" : ledger ? `${count(ledger.kept)} records` : ""),
    tile("Event loop", typeof status.event_loop_lag_seconds === "number" ? `${(1000 * status.event_loop_lag_seconds).toFixed(0)} ms` : "\u2013", "late at most"),
  ];
}

const IN_STAGES = ["init", "run", "eval", "record"];
const serves = (engine) => !engine.quarantine && !engine.unhealthy_reason && !engine.draining;

// A table, in a box that scrolls and is named after it. The cells of its rows are texts or elements.
function table(title, names, rows, empty) {
  if (!rows.length) return make("p", { class: "dim" }, empty);
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, make("table", {},
    make("thead", {}, make("tr", {}, ...names.map((name, i) => make("th", { scope: "col", class: i ? "number" : null }, name)))),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, make("th", { scope: "row" }, cells[0]), ...cells.slice(1).map((cell) => make("td", { class: "number" }, cell)))))));
}

// Put a new table in the place of the old one, which may be scrolled or have the focus.
function refillBox(host, fresh) {
  const scrolled = (box) => box.querySelector(".scroll") ?? box;
  const old = scrolled(host), [top, left] = [old.scrollTop, old.scrollLeft];
  const focus = host.contains(document.activeElement) ? [...host.querySelectorAll("button, select, [tabindex]")].indexOf(document.activeElement) : -1;
  host.replaceChildren(fresh);
  const box = scrolled(host);
  [box.scrollTop, box.scrollLeft] = [top, left];
  if (focus >= 0) host.querySelectorAll("button, select, [tabindex]")[focus]?.focus({ preventScroll: true });
}

const refill = (id, fresh) => refillBox(byId(id), fresh);

// The choices of a select, which keeps the chosen one. Values are names themselves, or pairs of value and name.
function options(select, all, values) {
  const wanted = [...(all === null ? [] : [["", all]]), ...values.map((value) => (Array.isArray(value) ? value : [value, value]))];
  if (wanted.length === select.options.length && wanted.every(([value, name], i) => select.options[i].value === value && select.options[i].textContent === name)) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map(([value, name]) => make("option", { value }, name)));
  if (wanted.some(([value]) => value === chosen)) select.value = chosen;
}

function meter(share, name) {
  const picture = draw("svg", { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": name });
  picture.append(draw("rect", { class: "rest", width: 100, height: 8 }), draw("rect", { class: "full", width: 100 * Math.min(Math.max(share, 0), 1), height: 8 }));
  return picture;
}

// The part of a batch with the largest difference.
function worst(parts) {
  const size = ([, one]) => one.max_abs_diff ?? Infinity;
  return Object.entries(parts).sort((a, b) => size(b) - size(a))[0]?.[0] ?? "\u2013";
}

function mismatchTable(status) {
  const rows = (status.mismatches ?? []).map(({ run_id, version, mismatch }) => [run_id, `${version}`, figure(mismatch.total.max_abs_diff), worst(mismatch.by_version), worst(mismatch.by_position), worst(mismatch.by_engine),
    figure(mismatch.total.kl)]);
  return table("Mismatch of log-probs by run", ["Run", "Version", "Largest, nats", "of version", "at", "of engine", "KL"], rows, "No trainer has reported it.");
}

function engineTable(status) {
  const state = (one) => (one.quarantine ? ["bad", `quarantined: ${one.quarantine}`] : one.unhealthy_reason ? ["bad", [one.unhealthy_since && `for ${lasting(Math.max(Date.now() / 1000 - one.unhealthy_since, 0))}`, one.unhealthy_reason].filter(Boolean).join(": ")] : one.draining ? ["none", "draining"] : ["good", "serves"]);
  const rows = (status.pools ?? []).flatMap((pool) => pool.engines.map((one) => {
    const [mood, words] = state(one);
    return [pool.name === "policy" ? one.name : `${pool.name}: ${one.name}`, make("b", { class: `badge ${mood}` }, words), `${one.version}`, count(one.in_flight),
      one.load && serves(one) ? count(one.load.waiting) : "\u2013", one.load && serves(one) ? percent(one.load.kv_usage) : "\u2013", percent(one.hit_rate), count(one.calls), count(one.failures)];
  }));
  return table("Engines by pool", ["Engine", "State", "Version", "In flight", "Its queue", "KV cache", "Hit rate", "Calls", "Failed"], rows, "This service has no pool of engines.");
}
