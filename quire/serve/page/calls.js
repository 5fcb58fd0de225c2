// Calls of tools in an answer: each folded with its name and arguments, and a field in which a person answers it.

import { element, grow } from "./dom.js";

const SHORT_CHARS = 60;

/** Takes a piece of `delta.tool_calls` into `calls`: [{id, name, arguments}]. */
export function gather(calls, pieces) {
  for (const { index, id, function: called } of pieces) {
    const call = calls[index] ??= { id: "", name: "", arguments: "" };
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}

/** Whether a call came to its end: one that was cut off can be neither answered nor sent back. */
export function isWhole(call) {
  try { return typeof JSON.parse(call.arguments) === "object"; } catch { return false; }
}

/** What the model is told of its calls: they, and the answers. */
export function asMessages(content, calls) {
  const made = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return [{ role: "assistant", content, tool_calls: made }, ...calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.answer ?? "No answer was given." }))];
}

/** The calls of one answer. `send(answers)` is called when a person has answered them all. */
export class CallsView {
  constructor(send) {
    this.send = send;
    this.made = [];
    this.open = null; // whether the fields were shown when it was made last
    this.node = element("div", { class: "calls", hidden: "" });
  }

  /** `asks`: the fields for answers are wanted. */
  show(calls, asks) {
    this.node.hidden = !calls.length;
    if (this.open !== asks) { this.made = []; this.node.replaceChildren(); }
    this.open = asks;
    calls.forEach((call, i) => { this.made[i] ??= this.make(call, asks, calls.length); this.made[i].paint(call); });
    if (asks && !this.node.querySelector(".row")) {
      this.node.append(element("div", { class: "row" }, element("button", { type: "button", class: "main", onclick: () => this.answer() }, calls.length === 1 ? "Send the answer" : "Send the answers")));
    }
  }

  make(call, asks, n) {
    const name = element("code"), short = element("span"), given = element("code");
    const fold = element("details", { class: "call" }, element("summary", {}, "Calls ", name, " ", short), element("pre", { tabindex: "0" }, given));
    const told = element("p", { class: "told", hidden: "" }), parts = [fold, told];
    let area = null;
    if (asks && isWhole(call)) {
      area = element("textarea", { rows: "1", "aria-label": `Answer of ${call.name}`, placeholder: n === 1 ? "What the call gives back" : `What ${call.name} gives back` });
      area.addEventListener("input", () => grow(area));
      area.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.answer(); }
      });
      parts.push(area);
    }
    this.node.append(...parts);
    return {
      area,
      paint: (now) => {
        name.textContent = now.name;
        short.textContent = fold.open ? "" : shortened(now.arguments);
        given.textContent = indented(now.arguments);
        told.hidden = now.answer === undefined;
        told.textContent = now.answer ?? "";
      },
    };
  }

  answer() {
    const empty = this.made.find(({ area }) => area && !area.value.trim());
    if (empty) empty.area.focus();
    else this.send(this.made.map(({ area }) => area?.value.trim()));
  }
}

function shortened(text) {
  const line = text.replace(/\s+/g, " ");
  return line.length > SHORT_CHARS ? line.slice(0, SHORT_CHARS) + "…" : line;
}

/** Arguments are JSON as far as a model keeps to it, and unfinished while they come. */
function indented(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}
