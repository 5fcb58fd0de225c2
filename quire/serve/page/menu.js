// A small menu beside a button: one for all of the page. Arrow keys move in it, Escape closes it.

import { $, element } from "./dom.js";

let opener = null;

export function buildMenu() {
  $("menu").addEventListener("toggle", (event) => { if (event.newState === "closed") opener?.setAttribute("aria-expanded", "false"); });
  $("menu").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") { event.stopPropagation(); $("menu").hidePopover(); opener.focus(); }
    if (!step) return;
    event.preventDefault();
    const entries = [...$("menu").children], at = entries.indexOf(document.activeElement);
    entries.at((at + step) % entries.length).focus();
  });
}

/** `entries`: [{label, run, note, kind}]. An entry without `run` cannot be chosen; its `note` says why. */
export function showMenu(button, name, entries) {
  $("menu").setAttribute("aria-label", name);
  $("menu").replaceChildren(...entries.map(({ label, run, note, kind = "" }) => {
    const made = element("button", { type: "button", role: "menuitem", class: kind, onclick: () => { if (run) { $("menu").hidePopover(); run(); } } }, label);
    if (note) made.append(element("small", {}, note));
    if (!run) made.setAttribute("aria-disabled", "true");
    return made;
  }));
  opener = button;
  button.setAttribute("aria-expanded", "true");
  $("menu").showPopover();
  const at = button.getBoundingClientRect(), { offsetHeight, offsetWidth } = $("menu");
  const below = at.bottom + 4 + offsetHeight <= innerHeight - 8;
  $("menu").style.top = `${Math.max(8, below ? at.bottom + 4 : at.top - 4 - offsetHeight)}px`;
  $("menu").style.left = `${Math.max(8, Math.min(at.left, innerWidth - offsetWidth - 8))}px`;
  $("menu").firstChild.focus();
}
