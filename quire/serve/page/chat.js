// Chat: the input, and what is done with the conversation that is shown. Answers go on in conversations that are not.

import { archive } from "./archive.js";
import { server } from "./client.js";
import { $, element, grow, icon, toast } from "./dom.js";
import { showMenu } from "./menu.js";
import { Talk } from "./talk.js";
import { thread } from "./thread.js";
import { canCall, openTools } from "./tools.js";

const MAX_FILE_CHARS = 200_000;

export const chat = { talk: new Talk(), changed: () => {} };
/** Conversations with an answer under way, by id: they are opened as they are, not from the archive. */
export const live = new Map();

export function buildChat() {
  thread.build({ again, goOn, edit, tell, countAfter });
  $("chat-form").addEventListener("submit", (event) => { event.preventDefault(); if (chat.talk.running) stopChat(); else send(); });
  $("input").addEventListener("input", () => { grow($("input")); trouble(""); });
  $("input").addEventListener("keydown", (event) => {
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
    if (!sends) return;
    event.preventDefault();
    if (!chat.talk.running) send();
  });
  $("attach").addEventListener("click", () => showMenu($("attach"), "Add to the message", additions()));
  $("file").addEventListener("change", () => { for (const file of $("file").files) addFile(file); $("file").value = ""; });
  buildDrops();
  thread.show(chat.talk);
  grow($("input"));
}

/** Questions that the server proposes for an empty conversation. */
export function showStarters(texts) {
  $("starters").replaceChildren(...texts.map((text) => element("button", { type: "button", onclick: () => say(text) }, text)));
  $("starters-lead").hidden = !texts.length;
}

/** What can be added, and why not. */
function additions() {
  const model = server.model ?? "The model";
  return [
    { label: "Text file", run: () => $("file").click(), note: "its text goes into the message" },
    { label: "Image", note: `${model} takes no images` },
    canCall() ? { label: "Tools", run: openTools, note: "functions that the model may call" } : { label: "Tools", note: `${model}'s chat template has no tools` },
  ];
}

/** Files come by dropping and pasting too. */
function buildDrops() {
  const box = $("chat-form");
  box.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
  box.addEventListener("drop", (event) => { if (event.dataTransfer.files.length) { event.preventDefault(); for (const file of event.dataTransfer.files) addFile(file); } });
  $("input").addEventListener("paste", (event) => { for (const file of event.clipboardData.files) { event.preventDefault(); addFile(file); } });
}

/** Show a conversation; null begins a new one. */
export async function openTalk(record) {
  const talk = record === null ? new Talk() : live.get(record.id) ?? await Talk.open(record);
  chat.talk = talk;
  remember();
  trouble("");
  thread.show(talk);
  busy();
  chat.changed();
}

/** A reload comes back to the conversation that this window shows. */
function remember() { sessionStorage.setItem("quire.talk", chat.talk.record?.id ?? ""); }

export async function openLast() {
  const record = (await archive.talks()).find((each) => each.id === sessionStorage.getItem("quire.talk"));
  if (record && !chat.talk.messages.length) await openTalk(record);
}

export function stopChat() { chat.talk.stop(); }

function send() {
  const text = $("input").value.trim();
  if (!text) return;
  $("input").value = "";
  grow($("input"));
  say(text);
}

async function say(text, replaced = []) {
  const { talk } = chat;
  if (!talk.begin()) return;
  trouble("");
  const question = { role: "user", content: text }, kept = talk.add(question);
  thread.refresh();
  busy();
  await kept;
  if (talk === chat.talk) remember();
  const failure = await answer(talk);
  if (failure?.code !== "context_length_exceeded") return;
  talk.cut(question);
  await talk.putBack(replaced);
  if (!talk.messages.length) { await archive.remove(talk.record); talk.record = null; }
  if (talk !== chat.talk) return;
  thread.refresh();
  chat.changed();
  $("input").value = $("input").value ? text + "\n" + $("input").value : text;
  grow($("input"));
  $("input").focus();
  trouble("Too long: " + failure.message.replace(/\.?$/, ".") + " Your message is back in the input: shorten it, or begin a new conversation.");
}

/** After `talk.begin`: a new answer at the end, or more of `message`. */
async function answer(talk, message = null) {
  const made = message ?? { role: "assistant", content: "", model: server.model, state: "running" };
  if (!message) await talk.add(made);
  live.set(talk.record.id, talk);
  const done = talk.reply(made, () => thread.grow(talk, made));
  if (talk === chat.talk) { thread.begin(); busy(); }
  chat.changed();
  const failure = await done;
  live.delete(talk.record.id);
  thread.ended(talk, made);
  busy();
  chat.changed();
  return failure;
}

function again(message) {
  const { talk } = chat;
  if (!talk.begin()) return;
  talk.cut(message);
  thread.refresh();
  answer(talk);
}

function goOn(message) { if (chat.talk.begin()) answer(chat.talk, message); }

function edit(message, text) {
  const { talk } = chat;
  if (talk.running) { toast("An answer is being made: stop it first."); return; }
  const removed = talk.cut(message);
  thread.refresh();
  say(text, removed);
}

/** A person's answers to the calls of the last message: the model goes on. */
async function tell(message, answers) {
  const { talk } = chat;
  if (!talk.begin()) return;
  message.calls.forEach((call, i) => { if (answers[i] !== undefined) call.answer = answers[i]; });
  await archive.putMessage(message);
  answer(talk);
}

function countAfter(message) { return chat.talk.messages.length - chat.talk.messages.indexOf(message) - 1; }

function busy() {
  const on = Boolean(chat.talk.running), button = $("chat-send");
  button.toggleAttribute("data-busy", on);
  button.title = on ? "Stop" : "Send";
  button.setAttribute("aria-label", button.title);
  button.replaceChildren(icon(on ? "stop" : "send"));
}

/** A line above the input; empty takes it away. */
function trouble(text) {
  $("chat-error").textContent = text;
  $("chat-error").hidden = !text;
}

/** A text file becomes a part of the message. Other files have no way to a model that reads text only. */
async function addFile(file) {
  const text = file.type.startsWith("image/") ? null : await file.text().catch(() => null);
  if (text === null || text.includes("\0") || text.includes("\uFFFD")) {
    trouble(file.type.startsWith("image/") ? `${file.name} is an image: ${server.model ?? "the model"} takes no images, it reads text only.`
      : `${file.name} is not a text: ${server.model ?? "the model"} reads text only.`);
    return;
  }
  if (text.length > MAX_FILE_CHARS) { trouble(`${file.name} has ${text.length.toLocaleString("en")} characters; at most ${MAX_FILE_CHARS.toLocaleString("en")} are taken.`); return; }
  const before = $("input").value, fence = text.includes("```") ? "~~~~" : "```";
  $("input").value = `${before}${before ? "\n\n" : ""}${file.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`;
  grow($("input"));
  $("input").focus();
}
