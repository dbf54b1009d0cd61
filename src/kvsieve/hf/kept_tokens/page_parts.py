"""Style and script of the page."""

STYLE = """
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font: .9rem/1.7 ui-monospace, "DejaVu Sans Mono", monospace; }
#text { border: 1px solid var(--line); border-radius: 6px; padding: .8rem; max-height: 75vh; overflow: auto; }
.tokens i { font-style: normal; background: color-mix(in srgb, var(--mark) var(--p), transparent); }
.s0 { --p: 0%; color: var(--quiet); } .s1 { --p: 7%; } .s2 { --p: 13%; } .s3 { --p: 19%; }
.s4 { --p: 25%; } .s5 { --p: 31%; } .s6 { --p: 37%; } .s7 { --p: 43%; } .s8 { --p: 49%; } .s9 { --p: 55%; }
.s10 { --p: 66%; }
.legend i { padding: .1rem .35rem; }
.d { text-decoration: underline; text-decoration-color: var(--mark); }
.c { font-weight: 700; outline: 1px dotted var(--quiet); }
.n::before { content: "\\21b5"; color: var(--quiet); }
.tokens .hit { border-bottom: 3px solid #d55e00; font-weight: 700; color: var(--ink); }
.part { display: block; font: 600 .8rem system-ui, sans-serif; color: var(--quiet); margin-top: .8rem; }
#find { font: inherit; padding: .2rem .4rem; max-width: 100%; }
#found { max-height: 30vh; overflow: auto; }
#found p { margin: .2rem 0; max-width: none; cursor: pointer; }
#map canvas { width: 100%; min-width: 320px; display: block; image-rendering: pixelated; }
#status { position: fixed; inset: auto 0 0 0; margin: 0; padding: .4rem 1.25rem; max-width: none;
  background: var(--shade); border-top: 1px solid var(--line); font-size: .85rem; }
"""

# The counterpart of Occurrence.
SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = Uint8Array.from(atob(data.shares), sign => sign.charCodeAt(0));
const pieces = [...document.querySelectorAll("#text i")];
const starts = [], offsets = [];
let whole = "", count = 0;
for (const piece of pieces) {
  starts.push(count); offsets.push(whole.length);
  count += Number(piece.dataset.n || 1); whole += piece.textContent;
}
const end = at => at + 1 < pieces.length ? starts[at + 1] : count;
const percent = share => (100 * share).toFixed(share > 0 && share < 0.01 ? 1 : 0) + "%";

function layerShares(from, to) {
  return data.layers.map((layer, row) => {
    let held = 0, came = 0, all = 0;
    for (let token = from; token < to; token++) {
      const part = bytes[row * data.tokens + token];
      if (part === 255) continue;
      came++; held += part / 200; all += part === 200;
    }
    const state = all === to - from ? "whole" : held ? "in part" : came ? data.lost : data.unreached;
    return {share: held / (to - from), state};
  });
}
function describe(from, to) {
  const found = layerShares(from, to), parts = [];
  let heads = 0, held = 0;
  found.forEach((each, row) => { heads += data.heads[row]; held += each.share * data.heads[row]; });
  for (let row = 0; row < found.length;) {
    let last = row;
    while (last + 1 < found.length && found[last + 1].state === found[row].state) last++;
    const shares = found.slice(row, last + 1).map(each => each.share);
    const [low, high] = [Math.min(...shares), Math.max(...shares)].map(percent);
    parts.push(data.layers[row] + (last > row ? "\u2013" + data.layers[last] : "") + " " + found[row].state
      + (found[row].state === "in part" ? " (" + (low === high ? low : low.slice(0, -1) + "\u2013" + high) + ")" : ""));
    row = last + 1;
  }
  const name = to - from > 1 ? "tokens " + from + "\u2013" + (to - 1) : "token " + from;
  return name + ": " + percent(held / Math.max(heads, 1)) + "; layers " + parts.join(", ");
}

const field = document.getElementById("find"), list = document.getElementById("found");
let hits = [];
function find() {
  document.querySelectorAll(".hit").forEach(piece => piece.classList.remove("hit"));
  list.replaceChildren(); hits = [];
  const text = field.value;
  if (text) {
    for (let at = whole.indexOf(text); at >= 0 && hits.length < 200; at = whole.indexOf(text, at + text.length)) {
      const last = at + text.length - 1;
      let from = offsets.length - 1, to = from;
      while (offsets[from] > at) from--;
      while (offsets[to] > last) to--;
      while (from < to && offsets[from + 1] === offsets[from]) from++;
      hits.push([starts[from], end(to)]);
      for (let piece = from; piece <= to; piece++) pieces[piece].classList.add("hit");
      const line = document.createElement("p");
      line.textContent = describe(starts[from], end(to));
      line.onclick = () => pieces[from].scrollIntoView({block: "center"});
      list.append(line);
    }
    if (!hits.length) list.textContent = "It does not occur.";
    else if (!location.hash) pieces.find(piece => piece.classList.contains("hit")).scrollIntoView({block: "nearest"});
  }
  draw();
}

const canvas = document.querySelector("#map canvas");
const MARK = 6, PALE = [244, 245, 247], FULL = [11, 92, 173], SAND = "#e8d9b8";
function draw() {
  const width = Math.max(1, Math.min(data.tokens, 1200)), height = data.layers.length;
  const place = token => Math.floor(token * width / data.tokens), size = height > 40 ? 6 : 10;
  canvas.width = width; canvas.height = height * size + MARK;
  canvas.style.height = canvas.height + "px";
  const pen = canvas.getContext("2d");
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      const from = Math.floor(column * data.tokens / width);
      const to = Math.max(from + 1, Math.floor((column + 1) * data.tokens / width));
      let held = 0, came = 0;
      for (let token = from; token < to; token++) {
        const part = bytes[row * data.tokens + token];
        if (part !== 255) { came++; held += part / 200; }
      }
      // Budgets are small: the square root tells few from fewer.
      const depth = Math.sqrt(held / (to - from));
      const colour = PALE.map((pale, part) => Math.round(pale + depth * (FULL[part] - pale)));
      pen.fillStyle = came ? `rgb(${colour})` : SAND;
      pen.fillRect(column, row * size, 1, size);
    }
  }
  pen.fillStyle = "#d55e00";
  for (const [from, to] of hits)
    pen.fillRect(place(from), height * size, Math.max(2, place(to) - place(from)), MARK);
}

const status = document.getElementById("status");
function tell(text) { status.hidden = !text; status.textContent = text; }
document.getElementById("text").addEventListener("mouseover", event => {
  const at = pieces.indexOf(event.target.closest("i"));
  tell(at < 0 ? "" : JSON.stringify(pieces[at].textContent) + ": " + describe(starts[at], end(at)));
});
canvas.addEventListener("mousemove", event => {
  const box = canvas.getBoundingClientRect();
  const down = (event.clientY - box.top) / box.height * canvas.height / (canvas.height - MARK);
  const row = Math.floor(down * data.layers.length);
  const token = Math.floor((event.clientX - box.left) / box.width * data.tokens);
  if (row < 0 || row >= data.layers.length || token < 0 || token >= data.tokens) return tell("");
  const part = bytes[row * data.tokens + token];
  tell("layer " + data.layers[row] + ", token " + token + ": " + (part === 255 ? data.unreached : percent(part / 200)));
});
canvas.addEventListener("mouseleave", () => tell(""));
field.addEventListener("input", find);
find();
"""
