// Where the time of one answer went: bars for queue, prompt and output, the steps it shared, and the reasons in words.

import { element, iconButton } from "./dom.js";
import { explain, request } from "./client.js";

/** A button, and what it unfolds: the explanation of answer `id`. Nothing is asked of the server before. */
export function waterfall(id) {
  const body = element("div", { class: "waterfall", hidden: "" });
  const button = iconButton("clock", "Where the time went", async () => {
    body.hidden = !body.hidden;
    button.setAttribute("aria-expanded", String(!body.hidden));
    if (body.hidden) return;
    body.replaceChildren("…");
    try {
      const told = await (await request(`v1/requests/${encodeURIComponent(id)}/explain`)).json();
      body.replaceChildren(...told.parts.flatMap(show));
    } catch (error) {
      body.replaceChildren(element("p", { class: "error" }, error.status === 404 ? "The server no longer knows of this answer: it remembers the latest ones." : explain(error)));
    }
    body.scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }, "why");
  button.setAttribute("aria-expanded", "false");
  return { button, body };
}

function show(part) {
  const whole = Math.max(part.ended_s ?? 0, ...part.phases.map((phase) => phase.to_s ?? phase.from_s), 1e-6);
  const rows = part.phases.map(({ name, from_s, to_s }) => {
    const end = to_s ?? whole;
    const track = element("span", { class: "track", title: `${name}: from ${inMs(from_s)} to ${inMs(end)}` }, bar("phase " + name, from_s / whole, end / whole));
    if (name === "prompt") for (const chunk of part.chunks) track.append(bar("chunk", chunk.time_s / whole, chunk.time_s / whole));
    if (name === "output") for (const group of part.steps) {
      if (group.n_prompt_tokens) track.append(bar("beside", group.time_s / whole, group.time_s / whole));
    }
    const expected = expectedIn(part.expectation, name);
    if (expected !== null) {
      const mark = bar("expected", from_s / whole, (from_s + expected) / whole);
      mark.title = `${inMs(expected)} were expected`;
      track.append(mark);
    }
    return element("div", { class: "phase-row" }, element("span", {}, name), track, element("span", {}, inMs(end - from_s)));
  });
  const scale = element("div", { class: "phase-row scale", "aria-hidden": "true" }, element("span"), element("span", {}, element("i", {}, "0 ms"), element("i", {}, inMs(whole))), element("span"));
  return [...rows, scale, ...part.reasons.map((reason) => element("p", { class: "fine" }, inWords(reason)))];
}

/** Seconds that a phase should have taken; null: nobody knows. */
function expectedIn(expectation, phase) {
  const told = expectation?.unknown === null ? expectation : {};
  if (phase === "output") return told.later_token ? told.later_token.expected_s * told.later_token.n_tokens : null;
  if (!told.first_token) return null;
  return phase === "queue" ? told.first_token.queue_s : told.first_token.expected_s - told.first_token.queue_s;
}

function bar(kind, from, to) {
  const found = element("i", { class: kind });
  found.style.left = `${100 * Math.min(1, from)}%`;
  found.style.width = `max(2px, ${100 * Math.max(0, to - from)}%)`;
  return found;
}

function inMs(seconds) {
  const ms = 1000 * seconds;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms).toLocaleString("en")} ms`;
}

/** The server writes its durations in seconds with three decimals. */
function inWords(reason) { return reason.replace(/\b(\d+\.\d{3}) s\b/g, (_, seconds) => inMs(Number(seconds))); }
