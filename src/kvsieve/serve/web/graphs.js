// Small graphs of the last minutes, drawn from samples of the server's counts.

import { $, bytes, count } from "./dom.js";

const SPAN = 300, WIDTH = 300, HEIGHT = 60, MARGIN = 3;
const SVG = "http://www.w3.org/2000/svg";
const samples = [];

// value: of a sample and the one before it. text: what is written beside the title.
const GRAPHS = [
  { title: "Tokens per second", value: (now, before) => rate(now, before, "tokens"), text: (value) => value.toFixed(1) },
  { title: "Running answers", value: (now) => now.running, text: count },
  { title: "Waiting requests", value: (now) => now.waiting, text: count },
  { title: "KV memory", value: (now) => now.memory, text: bytes },
  { title: "Store hits per minute", value: (now, before) => 60 * rate(now, before, "hits"), text: count },
];

const rate = (now, before, name) => Math.max(0, now[name] - before[name]) / (now.time - before.time);

/** Take a sample from the server's reply to v1/kv. */
export function addSample({ state, counts, store }) {
  samples.push({ time: performance.now() / 1000, running: state.running, waiting: state.queued + state.reading,
    memory: state.kv_bytes, tokens: counts.new_tokens ?? 0, hits: store.hits ?? 0 });
  while (samples.at(-1).time - samples[0].time > SPAN) samples.shift();
}

/** Draw all graphs; the first of two samples gives no rate, so one sample draws nothing. */
export function drawGraphs() {
  $("graphs").replaceChildren(...GRAPHS.map((graph) => {
    const points = samples.slice(1).map((now, at) => ({ time: now.time, value: graph.value(now, samples[at]) }));
    return figure(graph, points);
  }));
}

function figure(graph, points) {
  const made = document.createElement("figure"), caption = document.createElement("figcaption");
  const most = Math.max(0, ...points.map((point) => point.value)), last = points.at(-1);
  const said = last ? `${graph.text(last.value)} (at most ${graph.text(most)})` : "no sample yet";
  caption.append(graph.title + ": ", Object.assign(document.createElement("b"), { textContent: said }));
  made.append(caption, line(points, most, `${graph.title} over the last ${SPAN / 60} minutes: ${said}`));
  return made;
}

function line(points, most, label) {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "polyline");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const end = points.length ? points.at(-1).time : 0;
  path.setAttribute("points", points.map(({ time, value }) => {
    const x = WIDTH * (1 - (end - time) / SPAN), height = HEIGHT - 2 * MARGIN;
    return `${x.toFixed(1)},${(HEIGHT - MARGIN - height * (most ? value / most : 0)).toFixed(1)}`;
  }).join(" "));
  svg.append(path);
  return svg;
}
