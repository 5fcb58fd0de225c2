// What the rest of the page is built on: small tools, the sampling settings, and talking to the server.

export const $ = (id) => document.getElementById(id);
export const store = {
  get(name, fallback) { try { return JSON.parse(localStorage.getItem("quire." + name)) ?? fallback; } catch { return fallback; } },
  set(name, value) { try { localStorage.setItem("quire." + name, JSON.stringify(value)); } catch { /* private mode */ } },
};

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function grow(area) {
  if (!area.offsetParent) return; // not shown, so it has no height to measure
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
}

// ---------------------------------------------------------------- settings

const NUMBERS = [
  { key: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 0.7 },
  { key: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, value: 1 },
  { key: "top_k", label: "Top k", note: "0 = all", min: 0, max: 200, step: 1, value: 0 },
  { key: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, value: 0 },
  { key: "max_tokens", label: "Most tokens", min: 1, max: 2048, step: 1, value: 256 },
  { key: "seed", label: "Seed", note: "empty = new each time", plain: true, step: 1, value: "" },
  { key: "presence_penalty", label: "Presence penalty", more: true, min: -2, max: 2, step: 0.1, value: 0 },
  { key: "frequency_penalty", label: "Frequency penalty", more: true, min: -2, max: 2, step: 0.1, value: 0 },
  { key: "repetition_penalty", label: "Repetition penalty", more: true, min: 0.5, max: 2, step: 0.05, value: 1 },
];
const DEFAULTS = Object.fromEntries([...NUMBERS.map((each) => [each.key, each.value]), ["system", ""], ["stop", ""]]);
/** What the server does with a field that is not sent; completed by what the checkpoint proposes. */
const unsent = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1, seed: "" };
const chosen = store.get("settings", {});
export const settings = { ...DEFAULTS, ...chosen };
const fields = {};

export function buildSettings() {
  for (const spec of NUMBERS) {
    const label = element("label", { for: "set-" + spec.key }, spec.label, spec.note ? element("small", {}, "  " + spec.note) : "");
    const number = element("input", { id: "set-" + spec.key, type: "number", step: spec.step, inputmode: "decimal" });
    if (spec.min !== undefined) { number.min = spec.min; }
    const parts = [label, number];
    let range = null;
    if (!spec.plain) {
      range = element("input", { type: "range", min: spec.min, max: spec.max, step: spec.step, "aria-label": spec.label });
      range.addEventListener("input", () => { number.value = range.value; keep(spec.key, Number(range.value)); });
      parts.splice(1, 0, range);
    }
    number.addEventListener("input", () => {
      const value = number.value === "" ? spec.value : Number(number.value);
      if (range) range.value = value;
      keep(spec.key, value);
    });
    $(spec.more ? "more" : "basic").append(element("div", { class: "field number" + (spec.plain ? " plain" : "") }, ...parts));
    fields[spec.key] = (value) => { number.value = value; if (range) range.value = value; };
  }
  for (const key of ["system", "stop"]) {
    $(key).addEventListener("input", () => { keep(key, $(key).value); grow($(key)); });
    fields[key] = (value) => { $(key).value = value; grow($(key)); };
  }
  $("reset").addEventListener("click", () => {
    for (const key of Object.keys(chosen)) delete chosen[key];
    store.set("settings", chosen);
    showSettings();
  });
  showSettings();
}

function showSettings() {
  Object.assign(settings, DEFAULTS, chosen);
  for (const key of Object.keys(DEFAULTS)) fields[key](settings[key]);
}

function keep(key, value) {
  settings[key] = chosen[key] = value;
  store.set("settings", chosen);
}

/** The checkpoint's proposals stand where nothing was chosen here. */
export function adopt(proposals) {
  Object.assign(unsent, proposals);
  Object.assign(DEFAULTS, proposals);
  showSettings();
}

/** Request fields; those that say what the server does anyway are left out. */
function samplingFields() {
  const made = {};
  for (const { key } of NUMBERS) if (settings[key] !== unsent[key]) made[key] = settings[key];
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) made.stop = stop;
  return made;
}

// ---------------------------------------------------------------- the server

export const server = { model: null, key: sessionStorage.getItem("quire.key") || "" };

class ServerError extends Error {
  constructor(status, body) {
    const error = body && body.error ? body.error : {};
    super(error.message || `The server answered with status ${status}.`);
    this.status = status;
    this.param = error.param;
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

/** Streams one answer; `onText` gets each piece. Resolves to what is shown below the answer. */
export async function generate(path, body, signal, onText) {
  const begun = performance.now();
  let first = null, last = begun, usage = null, reason = null, id = null;
  const full = { model: server.model, ...samplingFields(), ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, { method: "POST", body: JSON.stringify(full), signal });
  for await (const event of events(response)) {
    const choice = event.choices[0];
    if (choice) {
      const text = choice.text ?? choice.delta.content;
      if (text) { last = performance.now(); first ??= last; onText(text); }
      reason = choice.finish_reason ?? reason;
    }
    usage = event.usage ?? usage;
    id = event.id ?? id;
  }
  return { first: first === null ? null : first - begun, spent: last - (first ?? last), usage, reason, id };
}

export function describe({ first, spent, usage, reason }) {
  const parts = [];
  if (first !== null) parts.push(`first token ${first < 1000 ? Math.round(first) + " ms" : (first / 1000).toFixed(1) + " s"}`);
  if (usage) {
    const made = usage.completion_tokens;
    if (made > 1 && spent > 0) parts.push(`${((made - 1) / (spent / 1000)).toFixed(made / spent > 0.1 ? 0 : 1)} tokens/s`);
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

export function announce(text) { $("announce").textContent = text; }
