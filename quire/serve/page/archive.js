// Conversations as this browser keeps them: an IndexedDB with one record for each conversation and one for each message.
// Where the browser gives none (some private windows), they live as long as the page, and `archive.kept` is false.

const MESSAGES = "messages", TALKS = "talks";

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open("quire", 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore(TALKS, { keyPath: "id" });
      asked.result.createObjectStore(MESSAGES, { keyPath: "key", autoIncrement: true }).createIndex("talk", "talk");
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
    asked.onblocked = () => reject(new Error("blocked"));
  });
}

function settled(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** The same few operations over maps, for a browser that keeps nothing. */
class Memory {
  talks = new Map();
  messages = new Map();
  next = 1;
  async all(name) { return [...this[name].values()].map((each) => ({ ...each })); }
  async of(talk) { return (await this.all(MESSAGES)).filter((each) => each.talk === talk); }
  async put(name, record) {
    const key = name === TALKS ? record.id : record.key ?? this.next++;
    this[name].set(key, name === TALKS ? { ...record } : { ...record, key });
    return key;
  }
  async remove(name, keys) { for (const key of keys) this[name].delete(key); }
}

class Disk {
  constructor(base) { this.base = base; }
  store(name, mode = "readonly") { return this.base.transaction(name, mode).objectStore(name); }
  all(name) { return settled(this.store(name).getAll()); }
  of(talk) { return settled(this.store(MESSAGES).index("talk").getAll(talk)); }
  put(name, record) { return settled(this.store(name, "readwrite").put(record)); }
  async remove(name, keys) {
    const place = this.store(name, "readwrite");
    await Promise.all(keys.map((key) => settled(place.delete(key))));
  }
}

class Archive {
  kept = true;
  changed = () => {};
  failed = () => {}; // told once when the browser refuses to store more
  #others = "BroadcastChannel" in globalThis ? new BroadcastChannel("quire") : null;
  #place = opened().then((base) => new Disk(base)).catch(() => { this.kept = false; return new Memory(); });

  constructor() { if (this.#others) this.#others.onmessage = () => this.changed(); }

  /** Resolves when it is known whether the browser keeps conversations. */
  async ready() { await this.#place; }

  /** All conversations, the latest first. */
  async talks() { return (await (await this.#place).all(TALKS)).sort((a, b) => b.updated - a.updated); }

  /** Messages of one conversation, in order. */
  async messages(talk) { return (await (await this.#place).of(talk)).sort((a, b) => a.key - b.key); }

  async putTalk(talk) { await this.#put(TALKS, talk); this.#tell(); }

  /** Stores a message and gives it its `key`. */
  async putMessage(message) { message.key = await this.#put(MESSAGES, message) ?? message.key; }

  /** A full disk must not end a conversation: what cannot be stored is still on the page. */
  async #put(name, record) {
    try {
      return await (await this.#place).put(name, record);
    } catch (error) {
      if (this.kept) this.failed(error);
      this.kept = false;
      return undefined;
    }
  }

  async removeMessages(messages) {
    const keys = messages.map((each) => each.key).filter((key) => key !== undefined);
    if (keys.length) await (await this.#place).remove(MESSAGES, keys);
  }

  /** Removes a conversation and gives back what `restore` takes. */
  async remove(talk) {
    const messages = await this.messages(talk.id), place = await this.#place;
    await place.remove(TALKS, [talk.id]);
    await place.remove(MESSAGES, messages.map((each) => each.key));
    this.#tell();
    return { talk, messages };
  }

  async restore({ talk, messages }) {
    for (const message of messages) await this.#put(MESSAGES, message);
    await this.putTalk(talk);
  }

  /** Conversations with `words` in their title or a message: [{talk, hit}], `hit` being the text around it or "". */
  async find(words) {
    const wanted = words.toLowerCase(), hits = new Map();
    for (const message of await (await this.#place).all(MESSAGES)) {
      if (hits.has(message.talk)) continue;
      const at = message.content.toLowerCase().indexOf(wanted);
      if (at >= 0) hits.set(message.talk, around(message.content, at, wanted.length));
    }
    const found = (await this.talks()).map((talk) => ({ talk, hit: hits.get(talk.id) ?? "" }));
    return found.filter(({ talk, hit }) => hit || talk.title.toLowerCase().includes(wanted));
  }

  #tell() { this.#others?.postMessage("changed"); }
}

function around(text, at, length) {
  const from = Math.max(0, at - 24);
  return (from ? "…" : "") + text.slice(from, at + length + 48).replace(/\s+/g, " ");
}

export const archive = new Archive();
