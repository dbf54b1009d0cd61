// Conversations and settings, kept in this browser.

const CONVERSATIONS = "kvsieve.conversations", SETTINGS = "kvsieve.settings";

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Return all conversations, the newest first. */
export const conversations = () => read(CONVERSATIONS, []);

/**
 * Keep a conversation. The oldest others leave where the browser has no room for all.
 * Returns false if it is too large by itself, or the browser keeps nothing.
 */
export function keep(conversation) {
  const all = [conversation, ...conversations().filter((each) => each.id !== conversation.id)];
  while (!write(CONVERSATIONS, all)) {
    if (all.length === 1) return false;
    all.pop();
  }
  return true;
}

export function forget(id) {
  write(CONVERSATIONS, conversations().filter((each) => each.id !== id));
}

export function forgetAll() {
  localStorage.removeItem(CONVERSATIONS);
}

export const settings = () => read(SETTINGS, {});

export const keepSettings = (values) => write(SETTINGS, values);

/** Return a conversation without turns. */
export function newConversation() {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: "", turns: [] };
}

/** Return what is sent as a turn's user message: documents first, so that a second question finds them in the store. */
export function contentOf(turn) {
  const several = turn.documents.length > 1;
  const texts = turn.documents.map((each) => (several ? each.name + ":\n" : "") + each.text);
  return [...texts, turn.text].filter((text) => text).join("\n\n");
}

/** Return the answer that goes on as one of two panes has it. */
export const answerOf = (turn, pane) => turn.answers[pane] ?? turn.answers[0] ?? turn.answers[1];

/** Return the messages before and with a turn, as one of two panes has seen them. */
export function messagesFor(turns, last, pane, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns.slice(0, last)) {
    const answer = answerOf(turn, pane);
    // Roles must alternate, so a turn without any answer is left out.
    if (!answer?.text) continue;
    messages.push({ role: "user", content: contentOf(turn) }, { role: "assistant", content: answer.text });
  }
  return [...messages, { role: "user", content: contentOf(turns[last]) }];
}
