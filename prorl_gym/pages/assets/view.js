// What is looked at: filters, order and the open rollout. It stands in the address's fragment, so that a view has a link.

const SCOPE = ["run", "environment", "evaluation", "problem"]; // what rewards and causes are shown of
const NARROWING = ["status", "detail", "why", "reward", "version", "text"]; // of the problems and the list, too
const VIEW = [...SCOPE, ...NARROWING, "state", "sort", "up", "order", "from", "to", "rollout", "beside"];

class View {
  constructor(onChange) {
    this.onChange = onChange;
    addEventListener("popstate", () => this.read());
    this.values = this.parse();
  }

  parse() {
    const given = new URLSearchParams(location.hash.slice(1));
    return Object.fromEntries(VIEW.filter((name) => given.has(name)).map((name) => [name, given.get(name)]));
  }

  read() {
    const before = this.values;
    this.values = this.parse();
    this.onChange(before);
  }

  // Change some values; null or "" takes one away. ``typed``: the address changes without a step of its own to go back to.
  set(changes, { typed = false } = {}) {
    const before = this.values;
    const wanted = { ...before, ...changes };
    this.values = Object.fromEntries(VIEW.filter((name) => wanted[name] !== undefined && wanted[name] !== null && wanted[name] !== "").map((name) => [name, `${wanted[name]}`]));
    const hash = new URLSearchParams(this.values).toString();
    if (hash !== new URLSearchParams(before).toString()) history[typed ? "replaceState" : "pushState"](null, "", hash ? `#${hash}` : location.pathname + location.search);
    this.onChange(before);
  }

  pick(names) { return Object.fromEntries(names.filter((name) => name in this.values).map((name) => [name, this.values[name]])); }
  get scope() { return this.pick(SCOPE); }
  get filter() { return this.pick([...SCOPE, ...NARROWING]); }
}
