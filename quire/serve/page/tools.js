// Tools that the model may call: a JSON list, kept in this browser and sent with each message of a chat. A person answers the calls.

import { server } from "./client.js";
import { $, grow, store } from "./dom.js";

const EXAMPLE = [
  ["get_weather", "Get the weather of a city", { city: { type: "string" } }],
  ["set_timer", "Set a timer", { minutes: { type: "integer", minimum: 1, maximum: 60 } }],
].map(([name, description, properties]) => ({ name, description, parameters: { type: "object", properties, required: Object.keys(properties) } }));
const NAME = /^[a-zA-Z0-9_-]{1,64}$/;

let tools = [];

/** Whether the loaded model can be told of tools. */
export function canCall() { return server.capabilities.includes("tools"); }

/** What is sent with a request. */
export function toolFields() { return tools.length && canCall() ? { tools } : {}; }

export function buildTools() {
  try { tools = read(store.get("tools", "")); } catch { /* an older note of this browser; the field shows it */ }
  $("tool-list").value = store.get("tools", "");
  $("tools-form").addEventListener("submit", (event) => { event.preventDefault(); save(); });
  $("tools-cancel").addEventListener("click", () => $("tools").close());
  $("tools-example").addEventListener("click", () => { $("tool-list").value = JSON.stringify(EXAMPLE, null, 2); grow($("tool-list")); trouble(""); });
  $("tools-given").addEventListener("click", openTools);
  $("tool-list").addEventListener("input", () => { grow($("tool-list")); trouble(""); });
  showTools();
}

export function openTools() {
  $("tool-list").value = store.get("tools", "");
  trouble("");
  $("tools").showModal();
  grow($("tool-list"));
  $("tool-list").focus();
}

/** How many there are, beside the input; nothing where there are none, or the model has none. */
export function showTools() {
  $("tools-given").hidden = !Object.keys(toolFields()).length;
  $("tools-given").textContent = `${tools.length} tool${tools.length === 1 ? "" : "s"}`;
}

function save() {
  const text = $("tool-list").value.trim();
  try { tools = read(text); } catch (error) { trouble(error.message); $("tool-list").focus(); return; }
  store.set("tools", text);
  $("tools").close();
  showTools();
}

/** Tools of a text: a list of {type, function}, or of functions as such. Throws what a person can mend. */
function read(text) {
  if (!text) return [];
  let list;
  try { list = JSON.parse(text); } catch (error) { throw new Error("This is no JSON: " + error.message); }
  if (!Array.isArray(list)) throw new Error("A list is needed: [ … ] around the tools.");
  return list.map((each, i) => {
    const called = each?.function ?? each;
    if (!NAME.test(called?.name ?? "")) throw new Error(`Tool ${i + 1} needs a "name" of 1 to 64 letters, digits, _ or -.`);
    return { type: "function", function: { name: called.name, description: called.description ?? "", parameters: called.parameters ?? { type: "object", properties: {} } } };
  });
}

function trouble(text) {
  $("tools-error").textContent = text;
  $("tools-error").hidden = !text;
}
