// The plans that answers are made under: one, or two to compare.

import { server } from "./api.js";
import { $ } from "./dom.js";

const methods = [$("method-0"), $("method-1")], budgets = [$("budget-0"), $("budget-1")];

export const comparing = () => $("compare").getAttribute("aria-pressed") === "true";

export const panes = () => (comparing() ? [0, 1] : [0]);

/** Return a pane's plan as requests name it. */
export function planOf(pane) {
  const budget = budgets[pane].disabled ? "" : budgets[pane].value.trim();
  return { method: methods[pane].value, ...(budget ? { budget } : {}) };
}

export const nameOf = (plan) => plan.method + (plan.budget ? " at " + plan.budget : "");

/** Fill the lists once the server has said what it allows; what was chosen before stays chosen. */
export function fillPlans() {
  for (const select of methods) {
    const before = select.value;
    select.replaceChildren(...server.methods.map((name) => new Option(name, name)));
    select.value = server.methods.includes(before) ? before : server.own;
    select.disabled = false;
  }
  offerSecond();
}

/** Choose the second plan: full KV beside another one, and beside full KV the server's own or rocketkv-mt. */
function offerSecond() {
  const first = methods[0].value;
  const others = ["full", server.own, "rocketkv-mt", ...server.methods].filter(
    (name) => name !== first && server.methods.includes(name));
  methods[1].value = others[0] ?? first;
  limitBudgets();
}

/** Full KV has no budget. */
function limitBudgets() {
  methods.forEach((select, pane) => { budgets[pane].disabled = select.value === "full"; });
}

export function beginPlans() {
  for (const select of methods) select.addEventListener("change", limitBudgets);
  $("compare").addEventListener("click", () => {
    const on = !comparing();
    $("compare").setAttribute("aria-pressed", on);
    $("plan-1").hidden = !on;
    if (on && methods[1].value === methods[0].value) offerSecond();
  });
}
