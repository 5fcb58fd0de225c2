// The conversation as it stands on the page. Only the latest messages are in the document; earlier ones come when scrolled to.

import { $ } from "./dom.js";
import { AnswerView, UserView } from "./message.js";

const WINDOW = 30;

class Thread {
  #talk = null;
  #first = 0; // index of the first message that is in the document
  #views = new Map();
  #queued = new Set();
  #does = {};
  #isAtEnd = true; // as of the last scrolling
  #cost = 0; // milliseconds of the last paint of a growing answer

  build(does) {
    this.#does = does;
    this.watch = new IntersectionObserver((seen) => { if (seen.at(-1).isIntersecting) this.earlier(); }, { root: $("talk"), rootMargin: "600px" });
    $("earlier").addEventListener("click", () => this.earlier());
    $("talk").addEventListener("scroll", () => this.#showWay(), { passive: true });
    $("messages").addEventListener("grown", () => { if (this.#isAtEnd) this.toEnd(); }); // formulas came later than their text
    $("to-end").addEventListener("click", () => this.toEnd());
  }

  /** Put another conversation on the page. */
  show(talk) {
    this.#talk = talk;
    this.#views.clear();
    this.#first = Math.max(0, talk.messages.length - WINDOW);
    $("live").replaceChildren();
    $("messages").replaceChildren(...talk.messages.slice(this.#first).map((message) => this.#make(message)));
    this.refresh();
    this.toEnd();
  }

  #make(message) {
    const view = message.role === "user" ? new UserView(message, this.#does) : new AnswerView(message, this.#does);
    this.#views.set(message, view);
    view.show?.(message === this.#talk.messages.at(-1));
    return view.node;
  }

  /** Bring the page up to the conversation after messages came or went. */
  refresh() {
    const { messages } = this.#talk;
    this.#first = Math.min(this.#first, messages.length);
    const held = new Set(messages);
    for (const [message, view] of this.#views) if (!held.has(message)) { view.node.remove(); this.#views.delete(message); }
    for (const message of messages.slice(this.#first)) if (!this.#views.has(message)) $("messages").append(this.#make(message));
    for (const message of messages.slice(-3)) this.#views.get(message)?.show?.(message === messages.at(-1));
    $("empty").hidden = messages.length > 0;
    $("earlier").hidden = this.#first === 0;
    $("earlier").textContent = `Show earlier messages (${this.#first.toLocaleString("en")})`;
    this.watch.unobserve($("earlier"));
    if (this.#first) this.watch.observe($("earlier"));
    this.#showWay();
  }

  earlier() {
    const talk = $("talk"), { messages } = this.#talk, from = Math.max(0, this.#first - WINDOW);
    const below = talk.scrollHeight - talk.scrollTop;
    $("messages").prepend(...messages.slice(from, this.#first).map((message) => this.#make(message)));
    this.#first = from;
    this.refresh();
    talk.scrollTop = talk.scrollHeight - below; // what was in view stays there
  }

  /** An answer begins at the end. */
  begin() {
    $("live").replaceChildren();
    this.refresh();
    this.toEnd();
  }

  /** Paint a growing answer with the next frame, if it is on the page. */
  grow(talk, message) {
    if (talk !== this.#talk || this.#queued.has(message)) return;
    this.#queued.add(message);
    // A very long answer takes long to read again: it is painted less often, so that the page stays quick.
    setTimeout(() => requestAnimationFrame(() => {
      this.#queued.delete(message);
      const began = performance.now(), view = this.#views.get(message);
      if (!view || talk !== this.#talk || message.state !== "running") return;
      const stick = this.atEnd();
      view.paint();
      view.speak($("live"));
      if (stick) this.toEnd();
      this.#showWay();
      this.#cost = performance.now() - began;
    }), this.#cost > 8 ? 3 * this.#cost : 0);
  }

  /** An answer ended. */
  ended(talk, message) {
    if (talk !== this.#talk) return;
    const stick = this.atEnd(), view = this.#views.get(message);
    view?.speak($("live"), true);
    this.refresh();
    view?.ended();
    if (stick) this.toEnd();
  }

  atEnd() { const talk = $("talk"); return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60; }
  toEnd() { $("talk").scrollTop = $("talk").scrollHeight; this.#showWay(); }
  #showWay() { this.#isAtEnd = $("to-end").hidden = this.atEnd(); }
}

export const thread = new Thread();
