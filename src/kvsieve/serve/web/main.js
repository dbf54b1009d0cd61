// The page: views, the list of conversations, the key.

import { connect, server, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { beginDocuments } from "./documents.js";
import { $, button, el } from "./dom.js";
import { drawGraphs } from "./graphs.js";
import { beginOperator, look } from "./operator.js";
import { beginPlans, fillPlans } from "./plans.js";
import { beginSettings } from "./settings.js";
import { conversations, forget, forgetAll } from "./storage.js";

let filled = false;

const say = (text) => { $("status").textContent = text; };

/** Show an error above everything; a missing key asks for one. null: all is well. */
function alarm(error) {
  $("alert").hidden = error === null;
  $("access").hidden = error?.status !== 401;
  $("alert").textContent = error?.message ?? "";
  if (!$("access").hidden) $("key").focus();
}

/**
 * Learn what the server allows, and show it. Nothing is sent before.
 * Returns whether that succeeded.
 */
async function ready() {
  if (filled) return true;
  say("Connecting");
  try {
    await connect();
  } catch (error) {
    // Another key was accepted meanwhile.
    if (filled) return true;
    say("");
    alarm(error);
    return false;
  }
  if (!filled) fill();
  return true;
}

function fill() {
  filled = true;
  say("");
  alarm(null);
  fillPlans();
  document.title = "kvsieve: " + server.model;
  $("model").textContent = server.model;
  $("max_tokens").max = server.maxTokens;
  chat.drawContext();
}

const chat = new Chat({ say, alarm, ready, listed: drawList });

/** Show the conversation of an id, or a new one. */
function open(id) {
  chat.open(id);
  drawList();
  toggleList(false);
}

function drawList() {
  $("list").replaceChildren(...conversations().map((each) => {
    const opening = button(each.title, () => open(each.id));
    if (each.id === chat.conversation.id) opening.setAttribute("aria-current", "true");
    const removing = button("×", () => {
      if (each.id === chat.conversation.id) chat.open();
      forget(each.id);
      drawList();
      $("new").focus();
    }, "Delete " + each.title);
    return el("li", {}, opening, removing);
  }));
}

function toggleList(on) {
  document.body.classList.toggle("listed", on);
  $("menu").setAttribute("aria-expanded", on);
}

$("menu").addEventListener("click", () => toggleList(!document.body.classList.contains("listed")));
$("conversations").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  toggleList(false);
  $("menu").focus();
});
$("new").addEventListener("click", () => open());
$("forget-all").addEventListener("click", () => {
  if (!confirm("Delete all conversations of this browser?")) return;
  $("settings").close();
  open();
  forgetAll();
  drawList();
});
$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  filled = false;
  ready();
});

const tabs = [$("tab-chat"), $("tab-operate")];

function show(tab) {
  for (const each of tabs) {
    const on = each === tab;
    each.setAttribute("aria-selected", on);
    each.tabIndex = on ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !on;
  }
  if (tab !== $("tab-operate")) return;
  drawGraphs();
  look();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = tabs[1 - tabs.indexOf(tab)];
    other.focus();
    show(other);
  });
}

beginPlans();
beginSettings();
beginDocuments(() => chat.drawContext());
beginOperator(alarm);
drawList();
ready();
chat.focus();
