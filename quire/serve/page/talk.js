// One conversation: its messages, in the archive and in memory, and the answer that is being made.

import { archive } from "./archive.js";
import { asMessages, gather, isWhole } from "./calls.js";
import { explain, generate } from "./client.js";
import { settings } from "./settings.js";
import { toolFields } from "./tools.js";

const SAVE_EVERY_MS = 2000, TITLE_CHARS = 60;

export class Talk {
  constructor(record = null, messages = []) {
    this.record = record;
    this.messages = messages;
    this.running = null;
    this.saved = 0;
    this.gone = false;
  }

  static async open(record) {
    const messages = await archive.messages(record.id);
    for (const each of messages) if (each.state === "running") each.state = "lost";
    return new Talk(record, messages);
  }

  /** Add a message and keep it; the first one gives the conversation its name. */
  async add(message) {
    const now = Date.now();
    this.record ??= { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: titleOf(message.content), created: now };
    this.record.updated = now;
    message.talk = this.record.id;
    message.time = now;
    this.messages.push(message);
    await archive.putMessage(message); // a key of its own orders it behind what another window wrote
    await archive.putTalk(this.record);
  }

  /** Take a message and all after it away; they come back with `putBack`. */
  cut(message) {
    const removed = this.messages.splice(this.messages.indexOf(message));
    archive.removeMessages(removed);
    return removed;
  }

  async putBack(messages) {
    this.messages.push(...messages);
    for (const each of messages) await archive.putMessage(each);
  }

  /** What is sent: no empty answers, and neighbours of one role as one, because many chat templates want them to alternate. */
  sent() {
    const found = [];
    if (settings.system.trim()) found.push({ role: "system", content: settings.system });
    for (const { role, content, calls } of this.messages) {
      const whole = calls?.filter(isWhole) ?? [];
      if (whole.length) { found.push(...asMessages(content, whole)); continue; }
      if (!content) continue;
      const last = found.at(-1);
      if (last?.role === role && !last.tool_calls) last.content += "\n\n" + content;
      else found.push({ role, content });
    }
    return found;
  }

  /** Take the turn to ask for an answer; false while another is made. */
  begin() {
    if (this.running) return false;
    this.running = new AbortController();
    return true;
  }

  stop() { this.running?.abort(); }

  /** It was deleted: end the answer, and write nothing more. */
  abandon() {
    this.gone = true;
    this.stop();
  }

  /** After `begin`: make `answer`, or more of it. `seen` is told of each piece. Returns the error that ended it, or null. */
  async reply(answer, seen) {
    const { signal } = this.running, before = answer.content.length;
    answer.state = "running";
    delete answer.error;
    const continues = before ? { continue_final_message: true, add_generation_prompt: false } : {};
    let began = null;
    const grown = () => { seen(); this.saveNow(answer, SAVE_EVERY_MS); };
    const onThought = (text) => {
      began ??= performance.now();
      answer.reasoning = (answer.reasoning ?? "") + text;
      answer.thoughtMs = performance.now() - began;
      grown();
    };
    const onCalls = (pieces) => { gather(answer.calls ??= [], pieces); grown(); };
    let failure = null;
    try {
      const body = { messages: this.sent(), ...toolFields(), ...continues };
      answer.result = await generate("v1/chat/completions", body, signal, (text) => { answer.content += text; grown(); }, onThought, onCalls);
      answer.state = "done";
    } catch (error) {
      failure = error.name === "AbortError" ? null : error;
      answer.state = failure ? "failed" : "stopped";
      if (failure) answer.error = explain(failure);
    }
    answer.content = before ? answer.content : answer.content.trimStart();
    this.running = null;
    await this.saveNow(answer, 0);
    return failure;
  }

  async saveNow(message, age) {
    const now = performance.now();
    if (this.gone || now - this.saved < age || !this.messages.includes(message)) return;
    this.saved = now;
    await archive.putMessage(message);
  }
}

export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_CHARS ? line.slice(0, TITLE_CHARS).trimEnd() + "…" : line;
}
