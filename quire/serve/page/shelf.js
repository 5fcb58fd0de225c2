// The list of conversations at the left: new, open, search, rename, export, delete.

import { archive } from "./archive.js";
import { chat, live, openTalk } from "./chat.js";
import { $, element, iconButton, toast } from "./dom.js";
import { saveTalk } from "./export.js";
import { showMenu } from "./menu.js";

const SHOWN = 100, WAIT_MS = 150;
const shelf = { limit: SHOWN, timer: 0, turn: 0, renaming: null };

/** `close` is called when a conversation was chosen, for a screen where the list covers it. */
export function buildShelf(close) {
  $("new").addEventListener("click", async () => { await openTalk(null); close(); $("input").focus(); });
  $("search").addEventListener("input", () => { clearTimeout(shelf.timer); shelf.timer = setTimeout(fill, WAIT_MS); });
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && $("search").value) { event.stopPropagation(); $("search").value = ""; fill(); }
  });
  $("more-talks").addEventListener("click", () => { shelf.limit += SHOWN; fill(); });
  $("talks").addEventListener("click", (event) => {
    const item = event.target.closest(".talk-open");
    if (item) { openTalk(item.talk); close(); }
  });
  chat.changed = archive.changed = fill;
  archive.failed = (error) => toast(`The browser stores no more (${error.name}): delete a conversation, or export this one.`, null, 10);
  fill();
}

async function fill() {
  if (shelf.renaming) return;
  const turn = ++shelf.turn, words = $("search").value.trim();
  const found = words ? await archive.find(words) : (await archive.talks()).map((talk) => ({ talk, hit: "" }));
  if (turn !== shelf.turn) return; // a later search came first
  const nodes = [];
  let heading = "";
  for (const { talk, hit } of found.slice(0, shelf.limit)) {
    if (period(talk.updated) !== heading) { heading = period(talk.updated); nodes.push(element("li", { class: "period" }, heading)); }
    nodes.push(item(talk, hit));
  }
  $("talks").replaceChildren(...nodes);
  $("more-talks").hidden = found.length <= shelf.limit;
  $("no-talks").hidden = found.length > 0;
  $("no-talks").textContent = words ? "Nothing found." : archive.kept ? "Your conversations stay in this browser." : "This browser keeps nothing here: conversations end with the page.";
  $("talk-title").textContent = chat.talk.record?.title ?? "New conversation";
}

function period(time) {
  const day = (when) => new Date(when).setHours(0, 0, 0, 0), days = Math.round((day(Date.now()) - day(time)) / 86_400_000);
  return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days < 7 ? "Last seven days" : new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}

function item(talk, hit) {
  const isOpen = talk.id === chat.talk.record?.id;
  const open = element("button", { type: "button", class: "talk-open", title: talk.title }, element("span", {}, talk.title));
  open.talk = talk;
  if (isOpen) open.setAttribute("aria-current", "true");
  if (hit) open.append(element("small", {}, hit));
  if (live.has(talk.id)) open.append(element("i", { class: "working", role: "img", "aria-label": "an answer is being made" }));
  const more = iconButton("dots", `Rename, export or delete: ${talk.title}`, () => actions(talk, more), "talk-more");
  more.setAttribute("aria-haspopup", "menu");
  more.setAttribute("aria-expanded", "false");
  return element("li", { class: "talk-item" }, open, more);
}

// ---------------------------------------------------------------- what is done with one

function actions(talk, button) {
  showMenu(button, "Conversation", [
    { label: "Rename", run: () => rename(talk, button) },
    { label: "Export as Markdown", run: () => save(talk, "markdown") },
    { label: "Export as JSON", run: () => save(talk, "json") },
    { label: "Delete", run: () => remove(talk), kind: "danger" },
  ]);
}

function rename(talk, button) {
  const field = element("input", { "aria-label": "Name of the conversation", maxlength: "200" });
  const place = button.closest("li");
  field.value = talk.title;
  const end = async (keeps) => {
    if (shelf.renaming !== field) return; // Enter also takes the focus away
    shelf.renaming = null;
    const title = field.value.trim();
    if (keeps && title) {
      if (chat.talk.record?.id === talk.id) chat.talk.record.title = title;
      if (live.has(talk.id)) live.get(talk.id).record.title = title;
      await archive.putTalk({ ...talk, title });
    }
    fill();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
  field.addEventListener("blur", () => end(true));
  shelf.renaming = field;
  place.replaceChildren(field);
  field.focus();
  field.select();
}

async function save(talk, kind) { saveTalk(talk, live.get(talk.id)?.messages ?? await archive.messages(talk.id), kind); }

async function remove(talk) {
  live.get(talk.id)?.abandon();
  const removed = await archive.remove(talk);
  if (chat.talk.record?.id === talk.id) await openTalk(null);
  fill();
  toast(`Deleted “${talk.title}”.`, { label: "Undo", run: async () => { await archive.restore(removed); fill(); } });
}
