// Quire's page: chat and raw completion over the public API, and a live view of the engine. No dependencies.
// `client.js` holds tools, settings and the server's side; `engine.js` the live view; here are chat, completion and start.

import { $, announce, buildSettings, describe, element, explain, generate, grow, server, settings, store } from "./client.js";
import { drawMap, drawSpark, look } from "./engine.js";
import { why } from "./waterfall.js";

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
    stats.append(...describe(result), why(result.id));
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
    $("text-stats").append(...describe(result), why(result.id));
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
