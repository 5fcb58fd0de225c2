// Talking to the server: requests with the key, event streams, and one answer as it is made.

import { $, element } from "./dom.js";
import { samplingFields, settings } from "./settings.js";

export const server = { model: null, room: 0, capabilities: [], key: sessionStorage.getItem("quire.key") || "" };

export class ServerError extends Error {
  constructor(status, body) {
    const error = body && body.error ? body.error : {};
    super(error.message || `The server answered with status ${status}.`);
    this.status = status;
    this.param = error.param;
    this.code = error.code;
  }
}

export async function request(path, options = {}) {
  const headers = server.key ? { authorization: "Bearer " + server.key } : {};
  if (options.body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, { error: { message: "The server cannot be reached." } });
  }
  if (!response.ok) {
    if (response.status === 401) askForKey();
    throw new ServerError(response.status, await response.json().catch(() => null));
  }
  return response;
}

function askForKey() {
  $("key-form").hidden = false;
  if (document.activeElement === document.body) $("key").focus();
}

/** Yields the events of a stream as objects; an error event is thrown, as is a stream that ends before its time. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true }; // a broken connection; what browsers call it differs
    });
    if (done) throw new ServerError(0, { error: { message: "The connection to the server was lost before the answer ended." } });
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const frame = buffer.slice(0, end);
      buffer = buffer.slice(end + 2);
      if (!frame.startsWith("data: ")) continue;
      if (frame === "data: [DONE]") return;
      const event = JSON.parse(frame.slice(6));
      if (event.error) throw new ServerError(response.status, event);
      yield event;
    }
  }
}

/** Streams one answer: `onText` gets each piece of it, `onThought` each piece of its reasoning, `onCalls` each of its calls. Resolves to what is shown below. */
export async function generate(path, body, signal, onText, onThought = () => {}, onCalls = () => {}) {
  const begun = performance.now();
  let first = null, last = begun, usage = null, reason = null, id = null;
  const full = { model: server.model, ...samplingFields(), ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, { method: "POST", body: JSON.stringify(full), signal });
  for await (const event of events(response)) {
    const choice = event.choices[0];
    if (choice) {
      const text = choice.text ?? choice.delta.content;
      const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
      const calls = choice.delta?.tool_calls;
      if (text || thought || calls) { last = performance.now(); first ??= last; }
      if (thought) onThought(thought);
      if (text) onText(text);
      if (calls) onCalls(calls);
      reason = choice.finish_reason ?? reason;
    }
    usage = event.usage ?? usage;
    id = event.id ?? id;
  }
  return { first: first === null ? null : first - begun, spent: last - (first ?? last), usage, reason, id };
}

/** Most tokens for a text to continue, where the API's own default is 16: what was chosen, else all the room that is left. */
export async function roomFor(prompt, signal) {
  if (settings.max_tokens !== "") return {};
  const body = JSON.stringify({ model: server.model, prompt });
  const { count, max_model_len } = await (await request("tokenize", { method: "POST", body, signal })).json();
  return { max_tokens: Math.max(1, max_model_len - count) };
}

export function describe({ first, spent, usage, reason }) {
  const parts = [];
  if (first !== null) parts.push(`first token ${first < 1000 ? Math.round(first) + " ms" : (first / 1000).toFixed(1) + " s"}`);
  if (usage) {
    const made = usage.completion_tokens; // what came all at once has no speed
    if (made > 1 && spent > 20) parts.push(`${((made - 1) / (spent / 1000)).toFixed(made / spent > 0.1 ? 0 : 1)} tokens/s`);
    parts.push(`${made} token${made === 1 ? "" : "s"}`);
    parts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  if (reason === "length") parts.push("cut at the token limit");
  return parts.map((part) => element("span", {}, part));
}

export function explain(error) {
  if (error.status === 401) return "The server needs an API key: enter it above and send again.";
  return error instanceof ServerError ? error.message : "The page failed: " + error.message;
}
