// Raw completion: a text that the model goes on with. What it wrote last stands on a coloured ground.

import { describe, explain, generate, roomFor } from "./client.js";
import { $, announce, element, store } from "./dom.js";
import { waterfall } from "./waterfall.js";

const sheet = { running: null, before: null };

export function stopSheet() { sheet.running?.abort(); }

export function buildSheet() {
  const text = $("text");
  text.value = store.get("text", "");
  text.addEventListener("scroll", () => { $("backdrop").scrollTop = text.scrollTop; });
  text.addEventListener("input", () => { sheet.before = null; mark(); store.set("text", text.value); });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); if (!sheet.running) goOn(); }
  });
  $("text-form").addEventListener("submit", (event) => { event.preventDefault(); if (sheet.running) stopSheet(); else goOn(); });
  $("text-undo").addEventListener("click", () => { undo(); text.focus(); });
  $("text-again").addEventListener("click", () => { undo(); goOn(); });
  $("text-clear").addEventListener("click", () => {
    stopSheet();
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

export function mark() {
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
  busy(true);
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
    const body = { prompt: text.value, ...await roomFor(text.value, control.signal) };
    const result = await generate("v1/completions", body, control.signal, (piece) => {
      pending += piece;
      if (!scheduled) { scheduled = true; requestAnimationFrame(paint); }
    });
    paint();
    const { button, body: unfolded } = waterfall(result.id);
    $("text-stats").append(button, ...describe(result), unfolded);
    announce("Completion complete.");
  } catch (error) {
    paint();
    if (error.name === "AbortError") $("text-stats").append(element("span", {}, "stopped"));
    else { $("text-error").textContent = explain(error); $("text-error").hidden = false; }
  }
  sheet.running = null;
  text.readOnly = false;
  store.set("text", text.value);
  busy(false);
  mark();
}

function busy(on) {
  $("text-send").textContent = on ? "Stop" : "Continue";
  $("text-send").toggleAttribute("data-busy", on);
}
