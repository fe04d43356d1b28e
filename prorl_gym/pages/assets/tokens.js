// The token view: every token of every segment, made when it comes into sight.

const CHUNK = 400; // tokens made at once: a chunk ends at the next line break, so that the text flows on
const LONGEST_CHUNK = 1200;
const BOUNDS = [0.9, 0.5, 0.1, 0.01]; // of the probability: least of each shade but the last

function shade(logprob) {
  const probability = Math.exp(logprob);
  const found = BOUNDS.findIndex((bound) => probability >= bound);
  return found < 0 ? BOUNDS.length : found;
}

class TokenView {
  constructor(host, segments, onToken) {
    this.host = host;
    this.segments = segments;
    this.onToken = onToken; // called with (segment, position, by keyboard)
    this.chunks = [];
    this.current = null;
    this.versions = [...new Set(segments.flatMap((segment) => segment.versions))].sort((a, b) => a - b);
    this.shadeOfVersion = new Map(this.versions.map((version, i) => [version, i % 6]));
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.fill(entry.target.chunk);
    }, { rootMargin: "800px 0px" });
    host.replaceChildren(...segments.map((segment, number) => this.segment(segment, number)));
    host.addEventListener("mouseover", (event) => this.point(event, false));
    host.addEventListener("click", (event) => this.point(event, true));
    host.addEventListener("keydown", (event) => this.key(event));
  }

  segment(segment, number) {
    const box = make("div", { class: "segment" });
    if (this.segments.length > 1) {
      const title = `Segment ${number + 1} of ${this.segments.length}: ${plural(segment.length, "token")}`;
      box.append(make("h2", { class: "segment-title" }, title, number ? make("span", { class: "dim" }, " - the history was rewritten") : null));
    }
    for (const section of segment.sections()) {
      const size = plural(section.end - section.start, "token");
      const call = section.call;
      const facts = call ? [call.facts, size].filter(Boolean).join(", ") : size;
      const name = call ? `Turn ${call.turn + 1}` : section.start ? "Observation" : "Prompt";
      box.append(make(this.segments.length > 1 ? "h3" : "h2", { class: "section-title" }, name, make("span", { class: "dim" }, ` ${facts}`)));
      box.append(...this.cut(segment, section));
    }
    return box;
  }

  // Cut a section into chunks: empty boxes of about the right height.
  cut(segment, section) {
    const boxes = [];
    let start = section.start, letters = 0, lines = 0;
    for (let i = start; i < section.end; i += segment.size(i)) {
      const text = segment.text(i), breaks = text.endsWith("\n"), next = i + segment.size(i);
      letters += text.length;
      lines += breaks ? 1 : 0;
      const long = next - start >= CHUNK;
      if (next < section.end && !(long && breaks) && next - start < LONGEST_CHUNK) continue;
      const element = make("div", { class: "chunk" });
      element.style.setProperty("contain-intrinsic-block-size", `auto ${Math.round(Math.max(lines, 1) * 14 + letters / 5)}px`);
      element.style.setProperty("min-block-size", `${Math.round(Math.max(lines, 1) * 14 + letters / 5)}px`);
      element.chunk = { segment, start, end: next, element, filled: false, call: section.call };
      this.chunks.push(element.chunk);
      this.seen.observe(element);
      boxes.push(element);
      [start, letters, lines] = [next, 0, 0];
    }
    return boxes;
  }

  fill(chunk) {
    if (chunk.filled) return;
    chunk.filled = true;
    this.seen.unobserve(chunk.element);
    const { segment } = chunk;
    const made = document.createDocumentFragment();
    for (let i = chunk.start; i < chunk.end; i += segment.size(i)) {
      const token = document.createElement("span");
      token.textContent = segment.text(i);
      token.at = i;
      token.className = this.classes(segment, i);
      if (segment.sampled(i) && (i === 0 || !segment.sampled(i - 1) || segment.version(i) !== segment.version(i - 1))) {
        token.dataset.version = `v${segment.version(i)}`;
      }
      made.append(token);
    }
    chunk.element.append(made);
    chunk.element.style.removeProperty("min-block-size");
  }

  classes(segment, i) {
    if (!segment.sampled(i)) return "t";
    return `t s p${shade(segment.logprob(i))} v${this.shadeOfVersion.get(segment.version(i))}`;
  }

  point(event, chosen) {
    const token = event.target.closest(".t");
    if (!token) return;
    const { segment } = token.parentElement.chunk;
    if (chosen) this.mark(token);
    this.onToken(segment, token.at, false);
  }

  mark(token) {
    this.current?.classList.remove("current");
    this.current = token;
    token.classList.add("current");
  }

  // Go to a token, wherever it is.
  go(segment, position, { keyboard = false, block = "center" } = {}) {
    const chunk = this.chunks.find((one) => one.segment === segment && one.start <= position && position < one.end);
    if (!chunk) return;
    this.fill(chunk);
    const tokens = chunk.element.children;
    let low = 0, high = tokens.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (tokens[middle].at <= position) low = middle; else high = middle - 1;
    }
    this.mark(tokens[low]);
    tokens[low].scrollIntoView({ block });
    this.onToken(segment, tokens[low].at, keyboard);
  }

  goToTurn(turn) {
    for (const segment of this.segments) {
      const call = segment.calls.find((one) => one.turn === turn);
      if (call) return this.go(segment, Math.min(call.start, segment.length - 1));
    }
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "below", ArrowUp: "above", Home: "first", End: "last" };
    const step = steps[event.key];
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (!this.current) return this.go(this.segments[0], 0, { keyboard: true });
    const { segment, start, end } = this.current.parentElement.chunk;
    const at = this.current.at;
    if (typeof step === "number") return this.step(segment, at, step);
    if (step === "below" || step === "above") return this.line(step === "below");
    const call = segment.call(at);
    const section = call ?? { start, end };
    this.go(segment, step === "first" ? section.start : section.end - 1, { keyboard: true, block: "nearest" });
  }

  step(segment, at, step) {
    let position = step > 0 ? at + segment.size(at) : at - 1;
    let where = segment;
    if (position < 0 || position >= segment.length) {
      where = this.segments[this.segments.indexOf(segment) + step];
      if (!where) return;
      position = step > 0 ? 0 : where.length - 1;
    }
    this.go(where, position, { keyboard: true, block: "nearest" });
  }

  // The token above or below on the screen; where a chunk or heading lies between, the one after or before.
  line(below) {
    const box = this.current.getClientRects()[0] ?? this.current.getBoundingClientRect();
    const reach = below ? box.bottom : box.top;
    for (let distance = 8; distance <= 96; distance += 8) {
      const found = document.elementFromPoint(box.left + 2, reach + (below ? distance : -distance))?.closest?.(".t");
      if (found && found !== this.current && this.host.contains(found)) {
        return this.go(found.parentElement.chunk.segment, found.at, { keyboard: true, block: "nearest" });
      }
    }
    const { segment } = this.current.parentElement.chunk;
    this.step(segment, this.current.at, below ? 1 : -1);
  }
}
