// What the status says, as tiles and tables.

function tile(name, value, note = "") {
  return make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value, make("span", { class: "dim" }, note)));
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

function tiles(status, latest) {
  const { capacity, ledger } = status;
  return [
    tile("Queued", count(status.queued + capacity.queued)),
    tile("Running", count(status.running), capacity.parked ? `${count(capacity.parked)} parked` : ""),
    tile("Finished", count(status.finished), latest.finished_per_second === undefined ? "" : `${figure(latest.finished_per_second)}/s`),
    tile("Tokens sampled", figure(status.sampled_tokens ?? 0), latest.tokens_per_second === undefined ? "" : `${figure(latest.tokens_per_second)}/s`),
    tile("Tokens wasted", percent(status.sampled_tokens ? status.wasted_tokens / status.sampled_tokens : null), "no reward"),
    tile("Sandboxes", status.sandboxes === null || status.sandboxes === undefined ? "\u2013" : count(status.sandboxes)),
    tile("Ledger", ledger ? bytes(ledger.bytes) : "\u2013", ledger?.full ? "full" : ledger ? `${count(ledger.kept)} kept` : ""),
    tile("Event loop", typeof status.event_loop_lag_seconds === "number" ? `${(1000 * status.event_loop_lag_seconds).toFixed(0)} ms` : "\u2013", "late at most"),
  ];
}

// A table, in a box that scrolls and is named after it. The cells of its rows are texts or elements.
function table(title, names, rows, empty) {
  if (!rows.length) return make("p", { class: "dim" }, empty);
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, make("table", {},
    make("thead", {}, make("tr", {}, ...names.map((name, i) => make("th", { scope: "col", class: i ? "number" : null }, name)))),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, make("th", { scope: "row" }, cells[0]), ...cells.slice(1).map((cell) => make("td", { class: "number" }, cell)))))));
}

function meter(share, name) {
  const picture = draw("svg", { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": name });
  picture.append(draw("rect", { class: "rest", width: 100, height: 8 }), draw("rect", { class: "full", width: 100 * Math.min(Math.max(share, 0), 1), height: 8 }));
  return picture;
}

function rewardTable(status) {
  return table("Mean rewards", ["Environment", "Mean reward", "Of 1", "Rewards"],
    (status.rewards ?? []).map((one) => [one.environment, one.mean.toFixed(3), meter(one.mean, `${percent(one.mean)} of 1`), count(one.count)]), "No rewards yet.");
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

function endTable(status) {
  const ends = new Map();
  for (const one of status.ended ?? []) {
    const name = [one.status, one.detail].filter(Boolean).join(": ");
    const known = ends.get(name) ?? { cause: one.cause, number: 0 };
    known.number += one.count;
    ends.set(name, known);
  }
  const total = [...ends.values()].reduce((sum, one) => sum + one.number, 0);
  const rows = [...ends].sort(([, a], [, b]) => b.number - a.number)
    .map(([name, one]) => [name, one.cause || "\u2013", count(one.number), meter(one.number / total, percent(one.number / total))]);
  return table("Ways to end", ["Ended as", "Caused by", "Rollouts", "Share"], rows, "Nothing has ended since the start.");
}

function engineTable(status) {
  const state = (one) => (one.quarantine ? ["bad", `quarantined: ${one.quarantine}`] : one.unhealthy_reason ? ["bad", one.unhealthy_reason] : one.draining ? ["none", "draining"] : ["good", "serves"]);
  const rows = (status.pools ?? []).flatMap((pool) => pool.engines.map((one) => {
    const [mood, words] = state(one);
    return [pool.name === "policy" ? one.name : `${pool.name}: ${one.name}`, make("b", { class: `badge ${mood}` }, words), `${one.version}`, count(one.in_flight),
      one.load ? `${count(one.load.waiting)}` : "\u2013", one.load ? percent(one.load.kv_usage) : "\u2013", percent(one.hit_rate), count(one.calls), count(one.failures)];
  }));
  return table("Engines by pool", ["Engine", "State", "Version", "In flight", "Its queue", "KV cache", "Hit rate", "Calls", "Failed"], rows, "This service has no pool of engines.");
}
