// Documents that go with the next message: chosen or dropped, counted in tokens before they are sent.

import { connect, countTokens } from "./api.js";
import { $, button, el } from "./dom.js";
import { documentText } from "./turns.js";

// Bytes of a request that a server takes by default.
const MOST_BYTES = 8 << 20;
let pending = [];
let changed = () => {};

/** Return the documents that can be sent. */
export const attached = () => pending.filter((each) => !each.error);

/** Return the documents, and attach none any more. */
export function takeDocuments() {
  const taken = attached().map(({ name, text, tokens }) => ({ name, text, tokens }));
  pending = [];
  draw();
  return taken;
}

/** Wait until all documents are read and counted. Returns false if one of them cannot be sent. */
export async function settled() {
  const loading = pending.filter((each) => each.loading);
  await Promise.all(loading.map((each) => each.loading));
  return loading.every((each) => !each.error);
}

function add(files) {
  for (const file of [...files]) {
    const each = { name: file.name, text: "", tokens: null, error: "" };
    each.loading = load(file, each).catch((error) => {
      // A missing key is asked for above the conversation; the document can be sent uncounted.
      if (error.status !== 401) each.error = error.message;
    }).finally(() => {
      each.loading = null;
      draw();
    });
    pending.push(each);
  }
  draw();
}

function decoded(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    throw new Error("not a text file in UTF-8");
  }
}

async function load(file, into) {
  if (file.size > MOST_BYTES) throw new Error("larger than 8 MiB");
  const text = decoded(await file.arrayBuffer());
  into.text = text.trim();
  if (!into.text) throw new Error("empty");
  await connect();
  into.tokens = await countTokens(into.text);
}

function draw() {
  $("documents").replaceChildren(...pending.map((each) => {
    const remove = button("×", () => {
      pending = pending.filter((other) => other !== each);
      draw();
      $("attach").focus();
    }, "Remove " + each.name);
    const said = each.error ? `${each.name}: ${each.error}` : each.loading ? each.name + " (counting)" : documentText(each);
    return el("li", { className: each.error ? "failed" : "" }, el("span", { textContent: said }), remove);
  }));
  changed();
}

/** Let files be chosen and dropped. notice: called after each change. */
export function beginDocuments(notice) {
  changed = notice;
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => {
    add($("file").files);
    $("file").value = "";
  });
  const room = $("room");
  room.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    room.classList.add("drop");
  });
  room.addEventListener("dragleave", (event) => {
    if (!room.contains(event.relatedTarget)) room.classList.remove("drop");
  });
  room.addEventListener("drop", (event) => {
    room.classList.remove("drop");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
}
