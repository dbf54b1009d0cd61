// One answer on the page: its plan, its text, how far it is, what it cost and what was kept.

import { button, bytes, copy, count, el } from "./dom.js";
import { markdown } from "./markdown.js";
import { nameOf } from "./plans.js";

/**
 * Show an answer's record, which is what the browser keeps:
 *   plan: {method, budget?}; text; reasoning: what the model thought before it; state: "waiting", "done", "stopped" or "failed"; error; finish: as the server has it;
 *   progress: tokens of the prompt, {processed, total}; first: seconds to the first token; usage: the server's.
 */
export class AnswerView {
  constructor(record, regenerate) {
    this.record = record;
    this.scheduled = false;
    const name = nameOf(record.plan);
    this.badge = el("span", { className: "badge", hidden: true });
    this.body = el("div", { className: "body" });
    this.thoughts = el("p");
    this.reasoning = el("details", { className: "reasoning", hidden: true }, el("summary", { textContent: "Reasoning" }), this.thoughts);
    this.bar = el("progress", { max: 1, "aria-label": "Prefill of " + name });
    this.progressText = el("span");
    this.progress = el("div", { className: "progress" }, this.bar, this.progressText);
    this.error = el("p", { className: "error", hidden: true });
    this.facts = el("p", { className: "facts" });
    this.notes = el("p", { className: "notes" });
    this.map = el("canvas", { className: "map", role: "img", height: 1, hidden: true });
    this.legend = el("small", { hidden: true, textContent: "Prompt from beginning to end; the darker, the more layers and heads kept it." });
    const copying = button("Copy", () => copy(this.record.text, copying), "Copy answer under " + name);
    this.again = button("Regenerate", regenerate, "Regenerate answer under " + name);
    this.again.classList.add("idle");
    this.tools = el("div", { className: "tools" }, copying, this.again);
    this.root = el("section", { className: "answer", "aria-label": "Answer under " + name },
      el("p", { className: "plan" }, el("b", { textContent: name }), this.badge),
      this.progress, this.reasoning, this.body, this.error, this.facts, this.notes, this.map, this.legend, this.tools);
    this.draw();
  }

  /** Draw soon: once for all that comes before the next picture. */
  update() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      if (this.scheduled) this.draw();
    });
  }

  draw() {
    this.scheduled = false;
    const { text, reasoning, state, error, finish } = this.record, waiting = state === "waiting";
    this.body.replaceChildren(markdown(text));
    this.reasoning.hidden = !reasoning;
    this.thoughts.textContent = reasoning ?? "";
    this.progress.hidden = !waiting || Boolean(text || reasoning);
    this.drawProgress();
    const said = state === "stopped" ? "Stopped." : finish === "length" ? "Cut at the longest answer." : "";
    this.error.hidden = !error && !said;
    this.error.classList.toggle("failed", Boolean(error));
    this.error.textContent = error || said;
    this.tools.hidden = waiting;
    // Screen readers wait for the end.
    this.root.setAttribute("aria-busy", waiting);
    this.drawCosts();
  }

  drawProgress() {
    const progress = this.record.progress;
    if (!progress) {
      this.bar.removeAttribute("value");
      this.progressText.textContent = "Waiting for the server";
      return;
    }
    this.bar.value = progress.total ? progress.processed / progress.total : 1;
    this.progressText.textContent = `Prefilling: ${count(progress.processed)} of ${count(progress.total)} tokens`;
  }

  drawCosts() {
    const { first, usage } = this.record, kv = usage?.kv;
    const parts = first === undefined ? [] : [`first token after ${first.toFixed(2)} s`];
    if (kv) {
      const decoding = kv.seconds - kv.ttft_s;
      if (usage.completion_tokens > 1 && decoding > 0) {
        parts.push(`${((usage.completion_tokens - 1) / decoding).toFixed(1)} tokens/s`);
      }
      parts.push(`${count(usage.completion_tokens)} tokens`, `${bytes(kv.bytes)} of KV`,
        `${count(kv.entries)} of ${count(kv.prompt_tokens)} entries kept`,
        `${count(usage.prompt_tokens_details.cached_tokens)} prompt tokens from the store`);
    }
    this.facts.textContent = parts.join(" · ");
    this.notes.textContent = (kv?.notes ?? []).map((note) => "Note: " + note).join("\n");
    this.drawMap(kv?.map ?? []);
  }

  /** Draw the map, one pixel of the canvas for each part, so that no gap lies between two. */
  drawMap(shares) {
    this.map.hidden = this.legend.hidden = !shares.length;
    if (!shares.length) return;
    this.map.width = shares.length;
    const context = this.map.getContext("2d");
    shares.forEach((share, at) => {
      context.fillStyle = `rgb(74 134 232 / ${share})`;
      context.fillRect(at, 0, 1, 1);
    });
    const mean = shares.reduce((sum, share) => sum + share, 0) / shares.length;
    this.map.setAttribute("aria-label", `Map of what was kept: ${Math.round(100 * mean)} % on average`);
    this.map.onmousemove = (event) => {
      const at = Math.min(Math.floor(event.offsetX / this.map.clientWidth * shares.length), shares.length - 1);
      this.map.title = `${Math.round(100 * shares[Math.max(at, 0)])} % kept`;
    };
  }

  /** Say how the answer compares with the reference. word: number of the first that differs, 0 for none. */
  compared(reference, word) {
    this.badge.hidden = false;
    this.badge.textContent = word ? `differs from ${reference} at word ${word}` : `= ${reference}`;
    this.badge.classList.toggle("differs", word > 0);
  }
}
