// What is sent with a request: system prompt, sampling, stop texts. Kept in this browser.

import { $, element, grow, store } from "./dom.js";

const NUMBERS = [
  { key: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 0.7 },
  { key: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, value: 1 },
  { key: "top_k", label: "Top k", note: "0 = all", min: 0, max: 200, step: 1, value: 0 },
  { key: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, value: 0 },
  { key: "max_tokens", label: "Max tokens", note: "empty = all the room", plain: true, min: 1, step: 1, value: "" },
  { key: "seed", label: "Seed", note: "empty = another each time", plain: true, step: 1, value: "" },
  { key: "presence_penalty", label: "Presence penalty", more: true, min: -2, max: 2, step: 0.1, value: 0 },
  { key: "frequency_penalty", label: "Frequency penalty", more: true, min: -2, max: 2, step: 0.1, value: 0 },
  { key: "repetition_penalty", label: "Repetition penalty", more: true, min: 0.5, max: 2, step: 0.05, value: 1 },
];
const DEFAULTS = Object.fromEntries([...NUMBERS.map((each) => [each.key, each.value]), ["system", ""], ["stop", ""]]);
/** What the server does with a field that is not sent; completed by what the checkpoint proposes. */
const unsent = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1, seed: "", max_tokens: "" };
const chosen = store.get("settings", {});
export const settings = { ...DEFAULTS, ...chosen };
const fields = {};

export function buildSettings() {
  for (const spec of NUMBERS) buildNumber(spec);
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

function buildNumber(spec) {
  const label = element("label", { for: "set-" + spec.key }, spec.label, spec.note ? element("small", { id: "note-" + spec.key }, "  " + spec.note) : "");
  const number = element("input", { id: "set-" + spec.key, type: "number", step: spec.step, inputmode: "decimal" });
  if (spec.min !== undefined) number.min = spec.min;
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

function showSettings() {
  Object.assign(settings, DEFAULTS, chosen);
  for (const key of Object.keys(DEFAULTS)) fields[key](settings[key]);
}

function keep(key, value) {
  settings[key] = chosen[key] = value;
  store.set("settings", chosen);
}

/** The checkpoint's proposals stand where nothing was chosen here; `room` is the model's context in tokens. */
export function adopt(proposals, room) {
  Object.assign(unsent, proposals);
  Object.assign(DEFAULTS, proposals);
  $("set-max_tokens").max = room;
  $("set-max_tokens").placeholder = room.toLocaleString("en");
  $("note-max_tokens").textContent = `  empty = all that fits in ${room.toLocaleString("en")}`;
  showSettings();
}

/** Request fields; those that say what the server does anyway are left out. */
export function samplingFields() {
  const made = {};
  for (const { key } of NUMBERS) if (settings[key] !== unsent[key]) made[key] = settings[key];
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) made.stop = stop;
  return made;
}
