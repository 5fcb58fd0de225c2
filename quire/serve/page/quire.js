// The start of the page, and its frame: tabs, theme, the columns at both sides, the key, and what Escape does.

import { buildChat, openLast, openTalk, stopChat } from "./chat.js";
import { server } from "./client.js";
import { buildSheet, mark, stopSheet } from "./completion.js";
import { $, drawIcons, grow, icon, store } from "./dom.js";
import { buildEngine, drawAll, look } from "./engine.js";
import { buildMenu } from "./menu.js";
import { buildSettings } from "./settings.js";
import { buildShelf } from "./shelf.js";
import { buildTools } from "./tools.js";

const dark = matchMedia("(prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 900px)");

// ---------------------------------------------------------------- tabs

/** A row of tabs: a click or an arrow key chooses; `chosen(name)` hears of it. */
function tabs(group, names, chosen) {
  const choose = (name) => {
    for (const each of names) {
      const on = each === name;
      $("tab-" + each).setAttribute("aria-selected", on);
      $("tab-" + each).tabIndex = on ? 0 : -1;
      $("panel-" + each).hidden = !on;
    }
    store.set(group, name);
    chosen(name);
  };
  names.forEach((name, i) => {
    $("tab-" + name).addEventListener("click", () => choose(name));
    $("tab-" + name).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = names.at((i + (event.key === "ArrowRight" ? 1 : -1)) % names.length);
      choose(other);
      $("tab-" + other).focus();
    });
  });
  const first = store.get(group, names[0]);
  choose(names.includes(first) ? first : names[0]);
}

// ---------------------------------------------------------------- the columns at both sides

/** Which buttons open a column. On a narrow screen it covers the page, and only one is open. */
const COLUMNS = { shelf: "shelf-toggle", side: "panel-toggle" };

function isOpen(name) { return document.body.dataset[name] === "open"; }

function setColumn(name, open, focus = true) {
  document.body.dataset[name] = open ? "open" : "closed";
  $(COLUMNS[name]).setAttribute("aria-expanded", String(open));
  if (!narrow.matches) store.set(name, open);
  else if (open) setColumn(name === "shelf" ? "side" : "shelf", false, false);
  const covered = narrow.matches && (isOpen("shelf") || isOpen("side"));
  $("main").inert = covered;
  $("veil").hidden = !covered;
  if (narrow.matches && focus) (open ? $(name).querySelector("button, input") : $(COLUMNS[name])).focus();
  drawAll();
  for (const id of ["system", "stop", "input"]) grow($(id));
}

function closeDrawers() {
  if (!narrow.matches) return false;
  const open = Object.keys(COLUMNS).filter(isOpen);
  for (const name of open) setColumn(name, false);
  return open.length > 0;
}

function fitColumns() {
  for (const name of Object.keys(COLUMNS)) setColumn(name, !narrow.matches && store.get(name, true), false);
}

function buildColumns() {
  for (const [name, button] of Object.entries(COLUMNS)) $(button).addEventListener("click", () => setColumn(name, !isOpen(name)));
  for (const button of [$("veil"), ...document.querySelectorAll(".drawer-close")]) button.addEventListener("click", closeDrawers);
  narrow.addEventListener("change", fitColumns);
  fitColumns();
}

// ---------------------------------------------------------------- theme, key, keyboard

function isDark() { return (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark"; }

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme").replaceChildren(icon(isDark() ? "sun" : "moon"));
  $("theme").title = isDark() ? "Light" : "Dark";
  drawAll();
}

function buildFrame() {
  $("theme").addEventListener("click", () => {
    const wanted = isDark() ? "light" : "dark";
    const own = (wanted === "dark") === dark.matches ? null : wanted; // what the system says needs no note
    store.set("theme", own);
    setTheme(own);
  });
  dark.addEventListener("change", () => setTheme(store.get("theme", null)));
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    server.key = $("key").value.trim();
    sessionStorage.setItem("quire.key", server.key);
    $("key").value = "";
    $("key-form").hidden = true;
    $("input").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("tools").open && !closeDrawers()) { stopChat(); stopSheet(); }
    if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) { event.preventDefault(); openTalk(null); $("input").focus(); }
  });
  addEventListener("resize", () => { drawAll(); grow($("input")); });
}

drawIcons();
buildSettings();
buildMenu();
buildTools();
buildChat();
buildSheet();
buildShelf(closeDrawers);
buildEngine();
buildFrame();
setTheme(store.get("theme", null));
tabs("mode", ["chat", "text"], (mode) => { $("system-field").hidden = mode !== "chat"; if (mode === "text") mark(); else grow($("input")); });
tabs("sidetab", ["engine", "settings"], () => { drawAll(); for (const id of ["system", "stop"]) grow($(id)); });
buildColumns();
look();
openLast();
