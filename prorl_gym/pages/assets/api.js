// Asking the service that this page came from. The token never stands in an address that is sent.

const TOKEN = "prorl-gym token";

class Refused extends Error {
  constructor(status, what, fix = "") {
    super([what, fix].filter(Boolean).join(" "));
    this.status = status;
  }
}

// The token from the address's fragment, which browsers keep to themselves, or from this tab's memory.
function knownToken() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const given = fragment.get("token");
  if (given) {
    sessionStorage.setItem(TOKEN, given);
    fragment.delete("token");
    history.replaceState(null, "", fragment.size ? `#${fragment}` : location.pathname + location.search);
  }
  return sessionStorage.getItem(TOKEN) ?? "";
}

class Service {
  constructor(token) { this.token = token; }

  async ask(path, query = {}, { text = false } = {}) {
    const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const address = given.length ? `${path}?${new URLSearchParams(given)}` : path;
    let answer;
    try {
      answer = await fetch(address, { headers: { Authorization: `Bearer ${this.token}` }, signal: AbortSignal.timeout(20000), cache: "no-store" });
    } catch {
      throw new Refused(0, "The service does not answer.", "It is asked again.");
    }
    if (!answer.ok) {
      const said = await answer.json().catch(() => ({}));
      throw new Refused(answer.status, said.error?.what ?? `The service answered ${answer.status}.`, said.error?.fix);
    }
    return text ? answer.text() : answer.json();
  }

  status() { return this.ask("v1/status"); }
  history() { return this.ask("v1/history"); }
  rollouts(query) { return this.ask("v1/rollouts", query); }
  analysis(query) { return this.ask("v1/analysis", query); }
  problems(query) { return this.ask("v1/problems", query); }
  groups(run) { return this.ask(`v1/runs/${encodeURIComponent(run)}/groups`); }
  page(id, beside) { return this.ask(`v1/rollouts/${encodeURIComponent(id)}/page`, { beside }, { text: true }); }
}
