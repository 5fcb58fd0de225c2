// One message as it is shown: a person's, or an answer with its reasoning folded above it and a row of icons below.

import { announce, copyText, element, grow, iconButton } from "./dom.js";
import { describe, server } from "./client.js";
import { CallsView, isWhole } from "./calls.js";
import { GrowingText } from "./markdown.js";
import { waterfall } from "./waterfall.js";

/** Marks that a screen reader would spell out. */
const MARKS = /\*\*|`+|^#{1,6} /gm;

/** A person's message. `does.edit(message, text)` resends it changed. */
export class UserView {
  constructor(message, does) {
    this.message = message;
    this.does = does;
    this.body = element("div", { class: "body" }, element("p", {}, message.content));
    this.tools = element("div", { class: "tools" },
      iconButton("copy", "Copy this message", (event) => copyText(message.content, event.currentTarget)),
      iconButton("pen", "Edit this message and send it again", () => this.edit(), "edit"));
    this.node = element("article", { class: "message user", "aria-label": "You" }, this.body, this.tools);
  }

  edit() {
    const area = element("textarea", { "aria-label": "Your message", rows: "1" });
    const later = this.does.countAfter(this.message);
    const note = later > 1 ? `The ${later} messages after it are replaced.` : "";
    const close = () => { form.replaceWith(this.body); this.tools.hidden = false; this.tools.querySelector(".edit").focus(); };
    const form = element("form", { class: "edit-form" }, area, element("div", { class: "row" }, element("span", { class: "hint" }, note),
      element("button", { type: "button", onclick: close }, "Cancel"), element("button", { class: "main" }, "Send")));
    form.addEventListener("submit", (event) => { event.preventDefault(); if (area.value.trim()) this.does.edit(this.message, area.value.trim()); });
    area.addEventListener("input", () => grow(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    });
    area.value = this.message.content;
    this.body.replaceWith(form);
    this.tools.hidden = true;
    grow(area);
    area.focus();
  }
}

/** An answer. `does.again(message)` and `does.goOn(message)` ask for another one and for more of this one; `does.tell(message, answers)` answers its calls. */
export class AnswerView {
  constructor(message, does) {
    this.message = message;
    this.does = does;
    this.thought = element("div", { class: "body" });
    this.summary = element("summary", {}, "Thinking…");
    this.fold = element("details", { class: "thought", hidden: "" }, this.summary, this.thought);
    this.fold.addEventListener("toggle", () => this.paintThought());
    this.body = element("div", { class: "body" });
    this.calls = new CallsView((answers) => does.tell(message, answers));
    this.foot = element("div", { class: "foot" });
    this.node = element("article", { class: "message assistant", "aria-label": "Answer" },
      element("div", { class: "who" }, message.model || server.model || "model"), this.fold, this.body, this.calls.node, this.foot);
    this.text = new GrowingText(this.body);
    this.thoughtText = new GrowingText(this.thought);
    this.said = 0;
  }

  get running() { return this.message.state === "running"; }

  /** Show what there is; `isLast` decides what can be done with it. */
  show(isLast) {
    this.isLast = isLast;
    this.node.toggleAttribute("aria-busy", this.running);
    if (this.running) this.node.setAttribute("aria-busy", "true");
    this.paint();
    this.foot.replaceChildren(...(this.running ? [] : this.footer(isLast)));
  }

  paint() {
    const { content, reasoning } = this.message;
    this.fold.hidden = !reasoning;
    if (reasoning) {
      const thinking = this.running && !content;
      this.fold.toggleAttribute("data-busy", thinking);
      this.summary.textContent = thinking ? `Thinking… ${this.thoughtTime()}` : `Thought for ${this.thoughtTime() || "a moment"}`;
      this.paintThought();
    }
    this.text.show(content, !this.running);
    const { calls = [] } = this.message;
    this.calls.show(calls, this.isLast && !this.running && calls.some((call) => call.answer === undefined && isWhole(call)));
  }

  paintThought() { if (this.fold.open) this.thoughtText.show(this.message.reasoning, !this.running || Boolean(this.message.content)); }

  thoughtTime() {
    const spent = (this.message.thoughtMs ?? 0) / 1000;
    return spent < 0.1 ? "" : `${spent.toFixed(spent < 10 ? 1 : 0)} s`;
  }

  /** Read whole sentences to a screen reader while the answer comes; `rest` includes the last one. */
  speak(region, rest = false) {
    const fresh = this.message.content.slice(this.said);
    const end = rest ? fresh.length : Math.max(fresh.lastIndexOf(". ") + 1, fresh.lastIndexOf("\n") + 1);
    if (end > 0) region.append(element("p", {}, fresh.slice(0, end).replace(MARKS, "")));
    this.said += end;
  }

  footer(isLast) {
    const { message } = this, { content, result, state } = message;
    const row = element("div", { class: "tools" }), stats = element("p", { class: "stats" }), parts = [row];
    if (content) row.append(iconButton("copy", "Copy this answer", (event) => copyText(content, event.currentTarget), "copy"));
    if (isLast) row.append(iconButton("again", content || message.calls ? "Regenerate this answer" : "Try again", () => this.does.again(message), "again"));
    if (isLast && content && !message.calls && state !== "failed") row.append(iconButton("forward", "Continue this answer", () => this.does.goOn(message), "go-on"));
    if (result) stats.append(...describe(result));
    if (state === "stopped") stats.append(element("span", {}, "stopped"));
    if (state === "lost") stats.append(element("span", {}, "the page was closed before the end"));
    if (result?.id) {
      const { button, body } = waterfall(result.id);
      row.append(button);
      parts.push(body);
    }
    row.append(stats);
    if (message.error) parts.unshift(element("p", { class: "error", role: "alert" }, message.error));
    return parts;
  }

  ended() { announce(this.message.calls && this.message.state === "done" ? `The model calls ${this.message.calls.map((call) => call.name).join(", ")}.` : this.message.state === "failed" ? "The answer failed." : this.message.state === "stopped" ? "Stopped." : "Answer complete."); }
}
