// Requests to the server, and what is known of it.

let key = "";
let connecting = null;

/** Facts about the server; empty until `connect` has succeeded. */
export const server = { model: "", methods: [], own: "", context: null, maxTokens: null };

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Use another API key from here on, and forget what is known of the server. */
export function useKey(value) {
  key = value;
  connecting = null;
}

function headers() {
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

async function request(path, options) {
  let reply;
  try {
    reply = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached. Is it still running?");
  }
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw new ApiError(reply.status, body.error?.message ?? `status ${reply.status}`);
}

export async function get(path) {
  return (await request(path, {})).json();
}

/** Return how many tokens a text has. */
export async function countTokens(text) {
  const body = JSON.stringify({ model: server.model, prompt: text, add_special_tokens: false, count_only: true });
  return (await (await request("tokenize", { method: "POST", body })).json()).count;
}

/** Load the model's name and the methods once; every caller waits for the same reply. A failure is tried anew. */
export function connect() {
  if (connecting) return connecting;
  const begun = load().catch((error) => {
    if (connecting === begun) connecting = null;
    throw error;
  });
  connecting = begun;
  return begun;
}

async function load() {
  const [models, kv] = await Promise.all([get("v1/models"), get("v1/kv")]);
  const offered = ["full", "rocketkv-mt"].filter((name) => kv.methods.includes(name));
  server.model = models.data[0].id;
  server.own = kv.methods[0];
  server.methods = [...new Set([...offered, ...kv.methods])];
  server.context = kv.context;
  server.maxTokens = kv.max_tokens;
  return server;
}

/** Yield the chunks of a streamed answer. Throws ApiError, also for an error in the middle of the stream. */
export async function* streamChat(body, signal) {
  const reply = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The connection was lost.");
    });
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      ended = ended || event === "data: [DONE]";
      if (event === "data: [DONE]") continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new ApiError(0, data.error.message);
      yield data;
    }
  }
  if (!ended) throw new ApiError(0, "The connection was lost.");
}
