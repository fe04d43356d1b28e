// The time of a rollout on one line, from its acceptance to its record: waiting is hatched, work is filled.

const STAGE_NAMES = { init: "INIT", run: "RUN", eval: "EVAL", accepted: "Waited to begin", attempts: "Earlier attempts" };

function seconds(value) {
  if (value >= 100) return `${count(Math.round(value))} s`;
  return value >= 0.1 || value === 0 ? `${value.toFixed(1)} s` : `${Math.round(value * 1e4) / 10} ms`;
}

function stageTimeline(stages) {
  const total = stages.reduce((sum, [, queued, active]) => sum + queued + active, 0);
  if (!stages.length) return make("p", { class: "dim" }, "It ended before its first stage.");
  const picture = draw("svg", { class: "timeline", viewBox: "0 0 1000 26", preserveAspectRatio: "none", "aria-hidden": "true" });
  const hatch = draw("pattern", { id: "waiting", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    draw("rect", { class: "hatch", width: 3, height: 8 }));
  picture.append(draw("defs", {}, hatch));
  let at = 0;
  const bar = (length, look, title) => {
    const width = total ? (length / total) * 1000 : 0;
    if (width) picture.append(draw("rect", { class: look, x: at, y: 0, width, height: 26 }, draw("title", {}, title)));
    at += width;
  };
  const list = make("ul", { class: "stages" });
  for (const [name, queued, active] of stages) {
    const title = STAGE_NAMES[name] ?? name, look = name in STAGE_NAMES ? name : "run";
    if (name === "accepted") {
      bar(queued, "queued", `${title} ${seconds(queued)}`);
      list.append(make("li", {}, make("i", { class: "swatch accepted" }), make("b", {}, title), ` ${seconds(queued)}`));
      continue;
    }
    bar(queued, "queued", `${title} queued ${seconds(queued)}`);
    bar(active, `active ${look}`, `${title} ${seconds(active)}`);
    list.append(make("li", {}, make("i", { class: `swatch ${look}` }), make("b", {}, title), ` ${seconds(active)}`,
      name === "attempts" ? null : make("span", { class: "dim" }, ` after ${seconds(queued)} queued`)));
  }
  return make("div", {}, picture, list);
}
