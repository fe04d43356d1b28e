// What was graded: texts, and patches as differences.

const DIFF_LINES = [["file", /^(diff |index |--- |\+\+\+ |new file|deleted file|old mode|new mode|rename |similarity )/], ["hunk", /^@@/], ["added", /^\+/], ["removed", /^-/]];
const SHORT_DIFF = 2000; // lines shown at first

function diffLine(line) {
  const kind = DIFF_LINES.find(([, form]) => form.test(line))?.[0] ?? "";
  return make("span", { class: `diff-line ${kind}` }, `${line}\n`);
}

function diffView(text) {
  const lines = text.replace(/\n$/, "").split("\n");
  const body = make("pre", { class: "diff", tabindex: 0 }, ...lines.slice(0, SHORT_DIFF).map(diffLine));
  if (lines.length <= SHORT_DIFF) return [body];
  const more = make("button", { class: "more", type: "button" }, `Show all ${count(lines.length)} lines`);
  more.addEventListener("click", () => { body.append(...lines.slice(SHORT_DIFF).map(diffLine)); more.remove(); });
  return [body, more];
}

const OUTCOMES = { passed: "added", failed: "removed", error: "removed", missing: "removed" };

// A line for each test, which begins with its outcome; other output is shown as it is.
function reportView(text) {
  const lines = text.split("\n");
  const shown = make("pre", { class: "diff", tabindex: 0 }, ...lines.slice(0, SHORT_DIFF).map((line) => make("span", { class: `diff-line ${OUTCOMES[line.split(" ")[0]] ?? ""}` }, `${line}\n`)));
  return lines.length > SHORT_DIFF ? [shown, make("p", { class: "dim" }, `and ${count(lines.length - SHORT_DIFF)} more lines`)] : [shown];
}

const PART_VIEWS = { diff: diffView, report: reportView, text: longText };

function gradedPart([name, kind, text]) {
  return make("section", { class: "message graded", "aria-label": name }, make("h2", {}, name), ...(text ? PART_VIEWS[kind](text) : [make("p", { class: "dim" }, "nothing")]));
}

// What was expected and what came stand side by side.
function gradedParts(parts) {
  const [first, second] = parts;
  if (first?.[0] !== "Expected" || !second) return parts.map(gradedPart);
  return [make("div", { class: "pair" }, gradedPart(first), gradedPart(second)), ...parts.slice(2).map(gradedPart)];
}

const SHORT_ANSWER = 300;

// Short answers stand above the conversation, too.
function answers(parts) {
  const pair = parts.filter(([name, , text]) => ["Expected", "Got"].includes(name) && text.length <= SHORT_ANSWER);
  return pair.length ? make("dl", { class: "answers" }, ...pair.map(([name, , text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text || "nothing")))) : null;
}
