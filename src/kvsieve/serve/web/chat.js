// The conversation that is shown: sending, stopping, answering anew.

import { countTokens, server, streamChat } from "./api.js";
import { attached, settled, takeDocuments } from "./documents.js";
import { $, count } from "./dom.js";
import { nameOf, panes, planOf } from "./plans.js";
import { look } from "./operator.js";
import { sampling, systemPrompt } from "./settings.js";
import { answerOf, conversations, keep, messagesFor, newConversation } from "./storage.js";
import { drawTurns } from "./turns.js";

// Parts of the map of what was kept, pixels from the end that count as the end, and milliseconds without typing after
// which the message is counted.
const PARTS = 120, NEAR = 60, PAUSE = 300;

export class Chat {
  /** page: {say(text), alarm(error), ready(), listed()} */
  constructor(page) {
    this.page = page;
    this.conversation = newConversation();
    this.views = [];
    this.running = null;
    this.atEnd = true;
    this.top = 0;
    this.counting = 0;
    this.counts = 0;
    const talk = $("talk");
    talk.addEventListener("scroll", () => {
      const near = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR;
      // Text that grew since the last scroll leaves the reader at the end; only scrolling up leaves it.
      this.atEnd = near || (this.atEnd && talk.scrollTop >= this.top);
      this.top = talk.scrollTop;
    });
    // Whatever grows, the last line stays in sight of a reader who is at the end.
    const follow = new ResizeObserver(() => this.atEnd && talk.scrollTo(0, talk.scrollHeight));
    follow.observe(talk);
    follow.observe($("turns"));
    this.listen();
  }

  listen() {
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    $("message").addEventListener("input", () => this.drawContext());
    $("stop").addEventListener("click", () => this.stop());
  }

  /** Show the conversation of an id, or a new one; what is generated for this one is stopped. */
  open(id) {
    this.stop();
    if (this.running && this.conversation.turns.length) keep(this.conversation);
    this.busy(null);
    this.conversation = conversations().find((each) => each.id === id) ?? newConversation();
    // The page was closed before these had ended.
    for (const answer of this.conversation.turns.flatMap((turn) => turn.answers)) {
      if (answer?.state === "waiting") answer.state = "stopped";
    }
    this.page.say("");
    this.draw();
  }

  draw() {
    this.atEnd = true;
    this.views = drawTurns(this.conversation.turns, {
      regenerate: (turn, pane) => this.begin(() => this.regenerate(turn, pane)),
      edit: (turn, text) => this.begin(() => this.ask(text, turn.documents, this.conversation.turns.indexOf(turn))),
    });
    this.drawContext();
  }

  stop() {
    this.running?.abort();
  }

  busy(running) {
    this.running = running;
    const on = running !== null;
    document.body.classList.toggle("busy", on);
    $("send").hidden = on;
    $("stop").hidden = !on;
    this.focus();
  }

  /** Go to the message's field, where that brings no keyboard up and no key is asked for. */
  focus() {
    if ($("access").hidden && matchMedia("(min-width: 701px)").matches) $("message").focus();
  }

  /** Send what was typed and attached. It stays in its place for as long as the server is not known. */
  send() {
    const typed = () => $("message").value.trim();
    if (!typed() && !attached().length) return;
    this.begin(async () => {
      if (!(await settled())) {
        this.page.say("Not sent: a document cannot be read");
        return;
      }
      const text = typed();
      $("message").value = "";
      await this.ask(text, takeDocuments(), this.conversation.turns.length);
    });
  }

  /** Run an action unless another one runs, once it is known which plans there are. */
  async begin(action) {
    if (this.running) return;
    const running = new AbortController();
    const stopped = new Promise((resolve) => running.signal.addEventListener("abort", () => resolve(false)));
    this.busy(running);
    try {
      if ((await Promise.race([this.page.ready(), stopped])) && this.running === running) await action();
    } finally {
      if (this.running === running) {
        this.busy(null);
      }
    }
  }

  /** Ask a question in place of a turn and all after it. */
  ask(text, documents, at) {
    const turn = { text, documents, answers: [null, null] }, conversation = this.conversation;
    conversation.turns.splice(at, Infinity, turn);
    conversation.title ||= (text || documents[0].name).slice(0, 60);
    this.draw();
    return this.answer(turn, panes());
  }

  /** Answer a turn anew under one plan. The turns after it go, if the user agrees. */
  async regenerate(turn, pane) {
    const turns = this.conversation.turns, at = turns.indexOf(turn) + 1, later = turns.length - at;
    if (later) {
      const gone = later === 1 ? "the message after it" : `the ${later} messages after it`;
      if (!confirm(`Answer this message anew, and delete ${gone}?`)) return;
      turns.splice(at);
      this.draw();
    }
    await this.answer(turn, [pane]);
  }

  async answer(turn, wanted) {
    const conversation = this.conversation, signal = this.running.signal;
    this.page.say("Answering");
    const answering = wanted.map((pane) => this.answerIn(pane, turn, signal));
    keep(conversation);
    this.page.listed();
    const records = await Promise.all(answering);
    look();
    if (this.conversation !== conversation) return;
    this.views.find((view) => view.turn === turn).compare();
    await this.countContext().catch(() => {});
    const kept = keep(conversation) ? "" : ". The browser has no room for this conversation";
    this.page.say(outcome(records) + kept);
  }

  /** Let one plan answer a turn; returns the record of the answer, whatever comes of it. */
  async answerIn(pane, turn, signal) {
    const before = turn.answers[pane]?.plan;
    const record = { plan: panes().includes(pane) || !before ? planOf(pane) : before, text: "", state: "waiting", error: "" };
    const messages = messagesFor(this.conversation.turns, this.conversation.turns.indexOf(turn), pane, systemPrompt());
    turn.answers[pane] = record;
    const view = this.views.find((each) => each.turn === turn).show(pane), began = performance.now();
    try {
      const request = { model: server.model, messages, stream: true, stream_options: { include_usage: true },
        return_progress: true, ...sampling(), kv: { ...record.plan, map: PARTS } };
      for await (const data of streamChat(request, signal)) {
        take(record, data, (performance.now() - began) / 1000);
        view.update();
      }
      record.state = "done";
    } catch (error) {
      record.state = signal.aborted ? "stopped" : "failed";
      record.error = signal.aborted ? "" : error.message;
      if (error.status === 401) this.page.alarm(error);
    }
    view.draw();
    return record;
  }

  /** Write how much of the context the conversation and what is about to be sent take, once nobody types. */
  drawContext() {
    clearTimeout(this.counting);
    this.counting = setTimeout(() => this.countContext().catch(() => {}), PAUSE);
  }

  async countContext() {
    if (!server.model) return;
    const number = ++this.counts, draft = { text: $("message").value.trim(), documents: attached(), answers: [] };
    const used = await tokensOf([...this.conversation.turns, draft]);
    if (number !== this.counts) return;
    const left = server.context - used;
    $("context").textContent = server.context === null ? `${count(used)} tokens`
      : `Context: ${count(used)} of ${count(server.context)} tokens, ${left < 0 ? count(-left) + " too many" : count(left) + " left"}`;
    $("context").classList.toggle("over", server.context !== null && left < 0);
  }
}

const totalOf = (turn) => Math.max(0, ...turn.answers.map((answer) => answer?.usage?.total_tokens ?? 0));

/**
 * Return the tokens of a conversation whose last turn is a draft: those of the last answer that the server has counted,
 * and those of every text after it.
 */
async function tokensOf(turns) {
  const counted = turns.findLastIndex(totalOf);
  const texts = counted < 0 ? [systemPrompt()] : [];
  let total = counted < 0 ? 0 : totalOf(turns[counted]);
  for (const turn of turns.slice(counted + 1)) {
    const answer = answerOf(turn, 0);
    // What got no answer is not sent again.
    if (answer && answer.state !== "waiting" && !answer.text) continue;
    texts.push(turn.text, answer?.text);
    for (const each of turn.documents) total += each.tokens ?? 0;
  }
  const counts = await Promise.all(texts.filter((text) => text).map(countTokens));
  return counts.reduce((sum, each) => sum + each, total);
}

function take(record, data, seconds) {
  const choice = data.choices[0];
  if (data.prompt_progress) record.progress = data.prompt_progress;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
  if (content || reasoning || calls) record.first ??= seconds;
  if (content) record.text += content;
  if (reasoning) record.reasoning = (record.reasoning ?? "") + reasoning;
  for (const { function: called } of calls ?? []) {
    if (called.name) record.text += `${record.text ? "\n\n" : ""}${called.name} `;
    record.text += called.arguments ?? "";
  }
  if (choice?.finish_reason) record.finish = choice.finish_reason;
  if (data.usage) record.usage = data.usage;
}

/** Say how answers have ended. */
function outcome(records) {
  const ends = { done: "has answered", stopped: "was stopped" };
  const states = new Set(records.map((record) => record.state));
  if (states.size === 1 && states.has("done")) return records.length > 1 ? "Both have answered" : "Answered";
  if (states.size === 1 && states.has("stopped")) return "Stopped";
  return records.map(({ plan, state, error }) => `${nameOf(plan)} ${ends[state] ?? "failed: " + error}`).join("; ");
}
