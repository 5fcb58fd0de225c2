// Where the time of one answer went: bars for queue, prompt and output, the steps it shared, and the reasons in words.

import { element, explain, request } from "./client.js";

const NAMES = { queue: "queue", prompt: "prompt", output: "output" };

/** A line that unfolds into the explanation of answer `id`; nothing is asked of the server before. */
export function why(id) {
  const body = element("div", { class: "waterfall" }, "…");
  const details = element("details", { class: "why" }, element("summary", {}, "where the time went"), body);
  details.addEventListener("toggle", async () => {
    if (!details.open) return;
    try {
      const told = await (await request(`v1/requests/${encodeURIComponent(id)}/explain`)).json();
      body.replaceChildren(...told.parts.flatMap(show));
    } catch (error) {
      body.replaceChildren(element("p", { class: "error" }, explain(error)));
    }
  });
  return details;
}

function show(part) {
  const whole = Math.max(part.ended_s ?? 0, ...part.phases.map((phase) => phase.to_s ?? phase.from_s), 1e-6);
  const rows = part.phases.map(({ name, from_s, to_s }) => {
    const end = to_s ?? whole;
    const track = element("span", { class: "track" }, bar("phase " + name, from_s / whole, end / whole));
    if (name === "prompt") for (const chunk of part.chunks) track.append(bar("chunk", chunk.time_s / whole, chunk.time_s / whole));
    if (name === "output") for (const group of part.steps) {
      if (group.n_prompt_tokens) track.append(bar("beside", group.time_s / whole, group.time_s / whole));
    }
    return element("div", { class: "phase-row" }, element("span", {}, NAMES[name] ?? name), track, element("span", {}, seconds(end - from_s)));
  });
  return [...rows, ...part.reasons.map((reason) => element("p", { class: "fine" }, reason))];
}

function bar(kind, from, to) {
  const found = element("i", { class: kind });
  found.style.left = `${100 * Math.min(1, from)}%`;
  found.style.width = `max(2px, ${100 * Math.max(0, to - from)}%)`;
  return found;
}

function seconds(value) {
  return value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}
