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

function gradedParts(parts) {
  return parts.map(([name, kind, text]) => make("section", { class: "message graded", "aria-label": name }, make("h2", {}, name), ...(kind === "diff" ? diffView(text) : longText(text))));
}
