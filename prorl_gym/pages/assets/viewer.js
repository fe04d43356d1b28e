// A trajectory page in a frame that may run its own program and nothing else: it has no origin, and so no token.

class Viewer {
  constructor(onClose) {
    this.service = null;
    this.dialog = byId("viewer");
    this.page = "";
    this.id = "";
    this.beside = ""; // the rollout that it is compared with
    byId("close").addEventListener("click", () => this.dialog.close());
    byId("save").addEventListener("click", () => this.save());
    this.dialog.addEventListener("close", () => { this.frame(""); onClose(); });
  }

  close() { if (this.dialog.open) this.dialog.close(); }

  async open(id, beside) {
    if (this.dialog.open && this.id === id && this.beside === beside) return;
    [this.id, this.beside] = [id, beside];
    byId("viewer-title").textContent = beside ? `Rollouts ${id} and ${beside}` : `Rollout ${id}`;
    byId("viewer-message").textContent = "Loading\u2026";
    byId("save").disabled = true;
    this.frame("");
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const page = await this.service.page(id, beside);
      if (this.id !== id || this.beside !== beside || !this.dialog.open) return;
      this.page = page;
      this.frame(page);
      byId("viewer-message").textContent = "";
      byId("save").disabled = false;
    } catch (error) {
      if (this.id === id && this.beside === beside) byId("viewer-message").textContent = error.message;
    }
  }

  frame(page) {
    const frame = make("iframe", { sandbox: "allow-scripts", title: "Trajectory", id: "trajectory" });
    frame.srcdoc = page;
    frame.hidden = !page;
    byId("trajectory").replaceWith(frame);
  }

  save() {
    const address = URL.createObjectURL(new Blob([this.page], { type: "text/html" }));
    make("a", { href: address, download: `${this.id}.html` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }
}
