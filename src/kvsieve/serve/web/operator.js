// The operator's view: what the server does now, its counts, and what its store holds.

import { get } from "./api.js";
import { $, bytes, count, el } from "./dom.js";
import { drawGraphs, sample } from "./graphs.js";

const EVERY = 2000;
let timer = null;

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

async function look(noted) {
  let known;
  try {
    known = await get("v1/kv");
  } catch (error) {
    noted(error);
    return;
  }
  noted(null);
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

/** Draw the view now and again while it is shown. noted: called with an error, or null. */
export function watch(on, noted) {
  clearInterval(timer);
  if (!on) return;
  drawGraphs();
  sample();
  look(noted);
  timer = setInterval(() => document.hidden || look(noted), EVERY);
}
