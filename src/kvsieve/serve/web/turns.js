// Turns of a conversation on the page: the user's message, and the answers to it side by side.

import { AnswerView } from "./answer.js";
import { markDifference } from "./difference.js";
import { $, button, copy, count, el } from "./dom.js";
import { nameOf } from "./plans.js";

const LONG = 3000;

/** What is shown of one turn. */
export class TurnView {
  /** actions: {regenerate(turn, pane), edit(turn, text)} */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.views = [null, null];
    this.message = el("div", { className: "user" });
    this.answers = el("div", { className: "answers" });
    this.root = el("article", { className: "turn" }, this.message, this.answers);
    this.drawMessage();
    turn.answers.forEach((record, pane) => record && this.show(pane));
    this.compare();
  }

  drawMessage() {
    const { text, documents } = this.turn;
    const chips = documents.map((each) => el("li", { textContent: documentText(each) }));
    const shown = text.length > LONG ? text.slice(0, LONG / 2) + " … " + text.slice(-LONG / 2) : text;
    const copying = button("Copy", () => copy(text, copying), "Copy message");
    this.edit = button("Edit", () => this.drawEditor(), "Edit message");
    this.edit.classList.add("idle");
    this.message.replaceChildren(
      ...(chips.length ? [el("ul", { className: "documents", "aria-label": "Documents" }, ...chips)] : []),
      el("p", { className: "text", textContent: shown }),
      el("div", { className: "tools" }, copying, this.edit));
  }

  drawEditor() {
    const field = el("textarea", { value: this.turn.text, "aria-label": "Edited message" });
    const leave = () => {
      this.drawMessage();
      this.edit.focus();
    };
    const send = () => (field.value.trim() || this.turn.documents.length) && this.actions.edit(this.turn, field.value.trim());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.message.replaceChildren(field,
      el("div", { className: "tools" }, button("Send", send, "Send edited message"), button("Cancel", leave, "Cancel editing")));
    field.focus();
  }

  /** Show the record of a pane in place of what was shown for it. */
  show(pane) {
    const view = new AnswerView(this.turn.answers[pane], () => this.actions.regenerate(this.turn, pane));
    this.views[pane] = view;
    this.answers.replaceChildren(...this.views.filter((each) => each).map((each) => each.root));
    this.answers.classList.toggle("two", this.views.every((each) => each));
    return view;
  }

  /** Mark in one answer what the other does not have, once both are there. Full KV is the reference where it is one. */
  compare() {
    const [left, right] = this.views;
    if (!left || !right) return;
    const other = right.record.plan.method === "full" && left.record.plan.method !== "full" ? left : right;
    const reference = other === right ? left : right;
    for (const view of [left, right]) {
      view.draw();
      view.badge.hidden = true;
    }
    if (left.record.state !== "done" || right.record.state !== "done") return;
    other.compared(nameOf(reference.record.plan), markDifference(reference.body, other.body));
  }
}

export const documentText = (each) => each.name + (each.tokens === null ? "" : ` (${count(each.tokens)} tokens)`);

/** Draw all turns of a conversation; returns their views. */
export function drawTurns(turns, actions) {
  const views = turns.map((turn) => new TurnView(turn, actions));
  $("turns").replaceChildren(...views.map((view) => view.root));
  $("hint").hidden = views.length > 0;
  return views;
}
