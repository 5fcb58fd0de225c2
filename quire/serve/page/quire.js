// Quire's page: chat and raw completion over the public API, and a live view of the engine. No dependencies.
// Order: small tools, settings, talking to the server, chat, completion, engine view, start.

const $ = (id) => document.getElementById(id);
const store = {
  get(name, fallback) { try { return JSON.parse(localStorage.getItem("quire." + name)) ?? fallback; } catch { return fallback; } },
  set(name, value) { try { localStorage.setItem("quire." + name, JSON.stringify(value)); } catch { /* private mode */ } },
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
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
const settings = { ...DEFAULTS, ...chosen };
const fields = {};

function buildSettings() {
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
function adopt(proposals) {
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

const server = { model: null, key: sessionStorage.getItem("quire.key") || "" };

class ServerError extends Error {
  constructor(status, body) {
    const error = body && body.error ? body.error : {};
    super(error.message || `The server answered with status ${status}.`);
    this.status = status;
    this.param = error.param;
  }
}

async function request(path, options = {}) {
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
    const { value, done } = await reader.read();
    if (done) throw new ServerError(0, { error: { message: "The connection ended before the answer did." } });
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
async function generate(path, body, signal, onText) {
  const begun = performance.now();
  let first = null, last = begun, usage = null, reason = null;
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
  }
  return { first: first === null ? null : first - begun, spent: last - (first ?? last), usage, reason };
}

function describe({ first, spent, usage, reason }) {
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

function explain(error) {
  if (error.status === 401) return "The server needs an API key: enter it above and send again.";
  return error instanceof ServerError ? error.message : "The page failed: " + error.message;
}

function announce(text) { $("announce").textContent = text; }

// ---------------------------------------------------------------- text as shown

/** A little Markdown, built from nodes and never from HTML: fenced and inline code, bold, paragraphs. */
function renderText(target, text) {
  const nodes = [];
  text.split(/^```/m).forEach((part, i) => {
    if (i % 2 === 1) {
      const code = part.replace(/^[^\n]*\n?/, "");
      nodes.push(element("pre", { tabindex: "0" }, element("code", {}, code.replace(/\n$/, ""))));
      return;
    }
    for (const paragraph of part.split(/\n{2,}/)) {
      const body = paragraph.replace(/^\n|\n$/g, "");
      if (body) nodes.push(element("p", {}, ...inline(body)));
    }
  });
  target.replaceChildren(...nodes);
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).filter(Boolean).map((piece) => {
    if (/^`[^`]+`$/.test(piece)) return element("code", {}, piece.slice(1, -1));
    if (/^\*\*[^*]+\*\*$/.test(piece)) return element("strong", {}, piece.slice(2, -2));
    return document.createTextNode(piece);
  });
}

function grow(area) {
  if (!area.offsetParent) return; // not shown, so it has no height to measure
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
}

// ---------------------------------------------------------------- chat

const STARTERS = ["What is 17 + 25?", "Hello! Who are you?", "Write a function that reverses a string.", "Extract name and age as JSON: Anna is 31 years old."];
const chat = { messages: [], running: null };

function buildChat() {
  for (const text of STARTERS) $("starters").append(element("button", { type: "button", onclick: () => say(text) }, text));
  $("chat-form").addEventListener("submit", (event) => { event.preventDefault(); chat.running ? stopChat() : say($("input").value.trim()); });
  $("input").addEventListener("input", () => grow($("input")));
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!chat.running) say($("input").value.trim());
    }
  });
  $("chat-clear").addEventListener("click", () => {
    stopChat();
    chat.running = null;
    busy($("chat-send"), false, "Send");
    chat.messages = [];
    $("messages").replaceChildren();
    $("empty").hidden = false;
    $("input").focus();
  });
  grow($("input"));
}

function say(text) {
  if (!text || chat.running) return;
  $("empty").hidden = true;
  chat.messages.push({ role: "user", content: text });
  const body = element("div", { class: "body" });
  renderPlain(body, text);
  $("messages").append(element("article", { class: "message user", "aria-label": "You" }, body));
  $("input").value = "";
  grow($("input"));
  reply();
}

function renderPlain(target, text) { target.replaceChildren(element("p", {}, text)); }

/** Ask for the next answer; the conversation ends with a user message. */
async function reply() {
  const body = element("div", { class: "body" });
  const stats = element("p", { class: "stats" });
  const article = element("article", { class: "message assistant", "aria-label": "Answer", "aria-busy": "true" },
    element("div", { class: "who" }, server.model || "model"), body, stats);
  for (const button of document.querySelectorAll(".again")) button.remove();
  $("messages").append(article);
  const answer = { role: "assistant", content: "" };
  const running = { control: new AbortController() };
  chat.running = running;
  busy($("chat-send"), true, "Send");
  scrollDown(true);
  let scheduled = false;
  const paint = () => { scheduled = false; const stick = atEnd(); renderText(body, answer.content); if (stick) scrollDown(true); };
  try {
    const messages = chat.messages.map(({ role, content }) => ({ role, content }));
    if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
    const result = await generate("v1/chat/completions", { messages }, running.control.signal, (text) => {
      answer.content += text;
      if (!scheduled) { scheduled = true; requestAnimationFrame(paint); }
    });
    stats.append(...describe(result));
    announce("Answer complete.");
  } catch (error) {
    if (error.name === "AbortError") stats.append(element("span", {}, "stopped"));
    else article.append(element("p", { class: "error", role: "alert" }, explain(error)));
  }
  if (chat.running !== running) return; // cleared meanwhile
  const stick = atEnd();
  renderText(body, answer.content);
  article.removeAttribute("aria-busy");
  if (answer.content) {
    chat.messages.push(answer);
    stats.append(element("button", { class: "text", type: "button", onclick: () => navigator.clipboard?.writeText(answer.content) }, "copy"));
  }
  stats.append(element("button", { class: "text again", type: "button", onclick: () => again(article, answer) }, answer.content ? "regenerate" : "try again"));
  chat.running = null;
  busy($("chat-send"), false, "Send");
  if (stick) scrollDown(true);
}

function again(article, answer) {
  if (chat.running) return;
  if (chat.messages.at(-1) === answer) chat.messages.pop();
  article.remove();
  reply();
}

function stopChat() { chat.running?.control.abort(); }

function atEnd() { const talk = $("talk"); return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60; }
function scrollDown(now) { if (now) $("talk").scrollTop = $("talk").scrollHeight; }

function busy(button, on, idle) {
  button.textContent = on ? "Stop" : idle;
  button.toggleAttribute("data-busy", on);
}

// ---------------------------------------------------------------- completion

const sheet = { running: null, before: null };

function buildSheet() {
  const text = $("text");
  text.value = store.get("text", "");
  const sync = () => { $("backdrop").scrollTop = text.scrollTop; };
  text.addEventListener("scroll", sync);
  text.addEventListener("input", () => { sheet.before = null; mark(); store.set("text", text.value); });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); if (!sheet.running) goOn(); }
  });
  $("text-form").addEventListener("submit", (event) => { event.preventDefault(); sheet.running ? sheet.running.abort() : goOn(); });
  $("text-undo").addEventListener("click", () => { undo(); text.focus(); });
  $("text-again").addEventListener("click", () => { undo(); goOn(); });
  $("text-clear").addEventListener("click", () => {
    sheet.running?.abort();
    text.value = "";
    sheet.before = null;
    $("text-stats").replaceChildren();
    $("text-error").hidden = true;
    mark();
    store.set("text", "");
    text.focus();
  });
  mark();
}

/** What the model wrote last stands on a coloured ground. */
function mark() {
  const { value } = $("text");
  const made = sheet.before !== null && value.startsWith(sheet.before) ? value.slice(sheet.before.length) : "";
  $("backdrop").replaceChildren(value.slice(0, value.length - made.length), made ? element("mark", {}, made) : "", "\n");
  $("backdrop").scrollTop = $("text").scrollTop;
  $("text-undo").disabled = $("text-again").disabled = sheet.before === null || Boolean(sheet.running);
}

function undo() {
  if (sheet.before === null) return;
  $("text").value = sheet.before;
  sheet.before = null;
  mark();
}

async function goOn() {
  const text = $("text");
  if (!text.value) { text.focus(); return; }
  const control = new AbortController();
  sheet.running = control;
  sheet.before = text.value;
  $("text-error").hidden = true;
  $("text-stats").replaceChildren();
  text.readOnly = true;
  busy($("text-send"), true, "Continue");
  mark();
  let scheduled = false, pending = "";
  const paint = () => {
    scheduled = false;
    text.value += pending;
    pending = "";
    text.scrollTop = text.scrollHeight;
    mark();
  };
  try {
    const result = await generate("v1/completions", { prompt: text.value }, control.signal, (piece) => {
      pending += piece;
      if (!scheduled) { scheduled = true; requestAnimationFrame(paint); }
    });
    paint();
    $("text-stats").append(...describe(result));
    announce("Completion complete.");
  } catch (error) {
    paint();
    if (error.name === "AbortError") $("text-stats").append(element("span", {}, "stopped"));
    else { $("text-error").textContent = explain(error); $("text-error").hidden = false; }
  }
  sheet.running = null;
  text.readOnly = false;
  store.set("text", text.value);
  busy($("text-send"), false, "Continue");
  mark();
}

// ---------------------------------------------------------------- engine view

const view = { samples: [], speeds: [], map: new Uint8Array(0), delay: 500 };
const SPEEDS = 120;

async function look() {
  if (!document.hidden) {
    try {
      const info = await (await request("v1/engine")).json();
      view.delay = 500;
      $("down").hidden = true;
      if ($("key-form").hidden === false && server.key) $("key-form").hidden = true;
      show(info);
    } catch (error) {
      view.delay = Math.min(view.delay * 1.5, 3000);
      trouble(error);
    }
  }
  setTimeout(look, view.delay);
}

function trouble(error) {
  const loading = error.status === 503;
  state(loading ? "wait" : "bad", error.status === 401 ? "locked" : loading ? "not ready" : "unreachable");
  $("down").hidden = error.status === 401;
  $("down").textContent = loading ? error.message : error.message + " Trying again…";
}

function state(kind, text) {
  const health = $("health");
  if (health.dataset.state !== kind) health.dataset.state = kind;
  if (health.textContent !== text) health.textContent = text;
}

function show(info) {
  const { stats } = info;
  if (server.model === null) adopt(info.default_sampling);
  server.model = info.model;
  $("model").textContent = $("model").title = info.model;
  document.title = info.model + " · Quire";
  state(info.healthy ? "good" : "bad", info.healthy ? (stats.n_running ? "working" : "ready") : "stalled");
  view.samples.push({ time: info.time_s, tokens: stats.generation_tokens });
  while (view.samples.length > 2 && info.time_s - view.samples[0].time > 2) view.samples.shift();
  const [from, to] = [view.samples[0], view.samples.at(-1)];
  const speed = to.time > from.time ? Math.max(0, (to.tokens - from.tokens) / (to.time - from.time)) : 0;
  view.speeds.push(speed);
  if (view.speeds.length > SPEEDS) view.speeds.shift();
  $("speed").textContent = speed >= 10000 ? (speed / 1000).toFixed(1) + "k" : String(Math.round(speed));
  $("running").textContent = stats.n_running;
  $("waiting").textContent = stats.n_waiting;
  const held = stats.n_pages - stats.n_pages_free;
  $("held").textContent = percent(held, stats.n_pages) ?? "0 %";
  $("hits").textContent = percent(stats.prefix_hits, stats.prefix_queries) ?? "–";
  view.map = Uint8Array.from(atob(stats.page_map), (char) => char.charCodeAt(0));
  $("map").setAttribute("aria-label", `Map of the KV pages: ${held} held, ${stats.n_pages_cached} cached, of ${stats.n_pages}`);
  const engine = info.engine;
  const each = Math.ceil(stats.n_pages / Math.max(1, view.map.length));
  const many = each > 1 ? `, ${each} a cell,` : "";
  $("map-note").textContent = `${stats.n_pages.toLocaleString("en")} pages of ${engine.page_size} tokens${many} on ${engine.device}; ` +
    `context ${engine.max_model_len.toLocaleString("en")} tokens; Quire ${info.version}`;
  drawSpark();
  drawMap();
}

function percent(part, whole) { return whole > 0 ? Math.round((100 * part) / whole) + " %" : null; }

/** A 2D context in CSS pixels, sharp on any screen. */
function canvas(id, height) {
  const surface = $(id), width = surface.clientWidth, scale = devicePixelRatio || 1;
  surface.style.height = height + "px";
  surface.width = Math.round(width * scale);
  surface.height = Math.round(height * scale);
  const context = surface.getContext("2d");
  context.scale(scale, scale);
  return { context, width };
}

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function drawSpark() {
  const height = 40, { context, width } = canvas("spark", height);
  if (!width) return;
  context.fillStyle = colour("--line");
  context.fillRect(0, height - 2, width, 1);
  const top = Math.max(10, ...view.speeds), step = width / (SPEEDS - 1), n = view.speeds.length;
  const point = (i) => [width - (n - 1 - i) * step, height - 2 - (view.speeds[i] / top) * (height - 6)];
  context.beginPath();
  view.speeds.forEach((_, i) => context.lineTo(...point(i)));
  context.strokeStyle = context.fillStyle = colour("--accent");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(point(0)[0], height);
  context.globalAlpha = 0.13;
  context.fill();
}

/** Colours of bookbinder's cloth, ordered so that neighbours differ. */
const BINDINGS = ["#c4543d", "#3f7fa6", "#cf9339", "#4f9a77", "#8a67b0", "#8f9a45", "#b35d8d", "#3f9aa0", "#a9744f", "#5b74c2", "#d0736c", "#6f8f5a"];

/** One small page for each page of the pool: free, cached, or the colour of the request that holds it. */
function drawMap() {
  const n = view.map.length, width = $("map").clientWidth;
  if (!n || !width) return;
  const gap = n > 1500 ? 1 : 2;
  let cell = 14;
  const rows = (size) => Math.ceil(n / Math.floor((width + gap) / (size + gap)));
  while (cell > 2 && rows(cell) * (cell * 1.25 + gap) > 230) cell -= 0.5;
  const across = Math.floor((width + gap) / (cell + gap)), pitch = (width + gap) / across, tall = cell * 1.25;
  const { context } = canvas("map", Math.ceil(n / across) * (tall + gap));
  const fixed = [colour("--free"), colour("--cached")];
  const fills = new Map();
  for (let i = 0; i < n; i++) {
    const owner = view.map[i];
    if (!fills.has(owner)) fills.set(owner, []);
    fills.get(owner).push(i);
  }
  for (const [owner, pages] of fills) {
    context.fillStyle = fixed[owner] ?? BINDINGS[(owner - 2) % BINDINGS.length];
    for (const i of pages) context.fillRect((i % across) * pitch, Math.floor(i / across) * (tall + gap), pitch - gap, tall);
  }
}

// ---------------------------------------------------------------- start

function choose(mode) {
  for (const name of ["chat", "text"]) {
    const on = name === mode;
    $("tab-" + name).setAttribute("aria-selected", on);
    $("tab-" + name).tabIndex = on ? 0 : -1;
    $("panel-" + name).hidden = !on;
  }
  $("system-field").hidden = mode !== "chat";
  store.set("mode", mode);
  document.body.dataset.side = "";
  $("panel-toggle").setAttribute("aria-expanded", "false");
  if (mode === "text") mark();
  for (const id of ["input", "system", "stop"]) grow($(id));
}

function buildFrame() {
  const tabs = { "tab-chat": "chat", "tab-text": "text" };
  for (const [id, mode] of Object.entries(tabs)) {
    $(id).addEventListener("click", () => { choose(mode); $(mode === "chat" ? "input" : "text").focus(); });
    $(id).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = id === "tab-chat" ? "tab-text" : "tab-chat";
      choose(tabs[other]);
      $(other).focus();
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { stopChat(); sheet.running?.abort(); }
  });
  $("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    setTheme(dark ? "light" : "dark");
  });
  $("panel-toggle").addEventListener("click", () => {
    const open = document.body.dataset.side !== "open";
    document.body.dataset.side = open ? "open" : "";
    $("panel-toggle").setAttribute("aria-expanded", String(open));
    if (open) { drawSpark(); drawMap(); }
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    server.key = $("key").value.trim();
    sessionStorage.setItem("quire.key", server.key);
    $("key").value = "";
    $("key-form").hidden = true;
    $("input").focus();
  });
  addEventListener("resize", () => { drawSpark(); drawMap(); grow($("input")); });
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  store.set("theme", theme);
  drawSpark();
  drawMap();
}

buildSettings();
buildChat();
buildSheet();
buildFrame();
if (store.get("theme", null)) setTheme(store.get("theme", null));
choose(store.get("mode", "chat"));
look();
