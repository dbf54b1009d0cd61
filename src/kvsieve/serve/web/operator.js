// The operator's view: the last minutes, what the server does now, its counts, and what its store holds.

import { get } from "./api.js";
import { $, bytes, count, el } from "./dom.js";
import { addSample, drawGraphs } from "./graphs.js";

// Milliseconds between two samples: while the view is shown, and while it is not.
const SHOWN = 2000, HIDDEN = 10000;
let timer = null;
let noted = () => {};

const shown = () => !$("operate").hidden;

const words = (name) => name.replaceAll("_", " ");

function facts(id, rows) {
  $(id).replaceChildren(...rows.map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row", textContent: name }), el("td", { textContent: value }))));
}

function table(id, head, rows) {
  $(id).replaceChildren(
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col", textContent: name })))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", { textContent: cell }))))));
}

/** Take a sample, and draw the view if it is shown. The next one follows by itself. */
export async function look() {
  try {
    draw(await get("v1/kv"));
  } catch (error) {
    if (shown()) noted(error);
  }
  clearTimeout(timer);
  timer = setTimeout(lookAgain, shown() ? SHOWN : HIDDEN);
}

function lookAgain() {
  if (document.hidden) timer = setTimeout(lookAgain, SHOWN);
  else look();
}

function draw(known) {
  addSample(known);
  if (!shown()) return;
  noted(null);
  drawGraphs();
  const state = known.state, limit = state.kv_limit;
  facts("now", [["Running answers", state.running], ["Prompts in prefill", state.reading], ["Queued", state.queued],
    ["Default plan", known.plan], ["Context", known.context === null ? "no limit" : count(known.context) + " tokens"]]);
  $("memory").value = limit ? state.kv_bytes / limit : 0;
  $("memory-text").textContent = bytes(state.kv_bytes) + (limit ? " of " + bytes(limit) : "") + " reserved";
  facts("counts", Object.entries(known.counts).map(([name, value]) => [words(name), count(value)]));
  facts("store", Object.entries(known.store).map(([name, value]) =>
    [words(name), name.endsWith("_bytes") ? bytes(value) : count(value)]));
  table("nodes", ["Node", "Session", "Tokens", "Plan", "In memory", "On disk", "Hits"],
    known.nodes.map((node) => [node.key.slice(0, 8), node.session ?? "", count(node.tokens), node.plan,
      bytes(node.memory_bytes), bytes(node.disk_bytes), node.hits]));
}

/** Take samples for as long as the page can be seen. alarm: called with an error, or null, while the view is shown. */
export function beginOperator(alarm) {
  noted = alarm;
  look();
}
