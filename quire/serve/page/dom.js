// Small tools for the document: elements, icons, what the browser keeps, copying, and what is said aloud.

export const $ = (id) => document.getElementById(id);

/** Small settings of this browser. What must not be lost stands in `archive.js`. */
export const store = {
  get(name, fallback) { try { return JSON.parse(localStorage.getItem("quire." + name)) ?? fallback; } catch { return fallback; } },
  set(name, value) { try { localStorage.setItem("quire." + name, JSON.stringify(value)); } catch { /* private mode */ } },
};

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// ---------------------------------------------------------------- icons

/** Strokes on a field of 24 by 24. */
const STROKES = {
  again: "M20 11a8 8 0 1 0-2.3 6.2 M20 4v7h-7",
  book: "M12 6.5C9.5 5 7 4.6 4 4.8v13.4c3-.2 5.5.2 8 1.8 2.5-1.6 5-2 8-1.8V4.8c-3-.2-5.5.2-8 1.7z M12 6.5V20",
  bubble: "M21 12a8 8 0 0 1-8 8H4l2-3.2A8 8 0 1 1 21 12z",
  check: "M5 12.5l4.5 4.5L19 7.5",
  clock: "M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17z M12 7.5V12l3 2",
  copy: "M9 9h11v11H9z M5 15H4V4h11v1",
  cross: "M6 6l12 12 M18 6L6 18",
  down: "M12 5v14 M6 13l6 6 6-6",
  dots: "M5 12h.01 M12 12h.01 M19 12h.01",
  forward: "M5 5.5l7 6.5-7 6.5z M13 5.5l7 6.5-7 6.5z",
  gear: "M4 7h9 M17 7h3 M4 17h3 M11 17h9 M15 4.8v4.4 M9 14.8v4.4",
  list: "M4 6h16 M4 12h16 M4 18h10",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  pen: "M4 20l1-4.5L16.5 4l3.5 3.5L8.5 19z M14 6.5l3.5 3.5",
  plus: "M12 5v14 M5 12h14",
  send: "M12 19V5 M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z M12 2.5v2 M12 19.5v2 M2.5 12h2 M19.5 12h2 M5.3 5.3l1.4 1.4 M17.3 17.3l1.4 1.4 M5.3 18.7l1.4-1.4 M17.3 6.7l1.4-1.4",
  thought: "M9.5 18h5 M10.5 21h3 M12 3a6 6 0 0 0-3.5 10.9c.7.5 1 1.3 1 2.1h5c0-.8.3-1.6 1-2.1A6 6 0 0 0 12 3z",
};

export function icon(name) {
  const space = "http://www.w3.org/2000/svg", made = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  made.setAttribute("viewBox", "0 0 24 24");
  made.setAttribute("class", "icon-drawing");
  made.setAttribute("aria-hidden", "true");
  path.setAttribute("d", STROKES[name]);
  made.append(path);
  return made;
}

/** A button that is only an icon, with its name for the pointer and for a screen reader. */
export function iconButton(name, label, onclick, kind = "") {
  return element("button", { type: "button", class: `icon ${kind}`.trim(), "aria-label": label, title: label, onclick }, icon(name));
}

/** Put an icon before the text of every `data-icon` in the page. */
export function drawIcons() {
  for (const place of document.querySelectorAll("[data-icon]")) place.prepend(icon(place.dataset.icon));
}

// ---------------------------------------------------------------- size, speech, copying

export function grow(area) {
  if (!area.offsetParent) return; // not shown, so it has no height to measure
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
}

/** Say it to a screen reader once. */
export function announce(text) { $("announce").textContent = text; }

let hide = 0;

/** A line at the bottom for some seconds; `action` is {label, run} for one button in it. */
export function toast(text, action = null, seconds = action ? 8 : 3) {
  const box = $("toast");
  clearTimeout(hide);
  box.replaceChildren(element("span", {}, text));
  if (action) box.append(element("button", { type: "button", onclick: () => { box.hidden = true; action.run(); } }, action.label));
  box.hidden = false;
  hide = setTimeout(() => { box.hidden = true; }, 1000 * seconds);
}

/** Copy, also where the page came over plain http and the browser hides its clipboard. Says how it went. */
export async function copyText(text, button = null) {
  const good = await copied(text);
  if (!good) { toast("The browser does not let this page copy. Select the text and press Ctrl+C.", null, 6); return; }
  announce("Copied.");
  if (!button) { toast("Copied"); return; }
  const before = [...button.childNodes];
  if (button.dataset.done) return;
  button.dataset.done = "yes";
  button.replaceChildren(icon("check"), ...(button.classList.contains("icon") ? [] : ["Copied"]));
  setTimeout(() => { button.replaceChildren(...before); delete button.dataset.done; }, 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text); // undefined outside of https and localhost
    return true;
  } catch { /* the older way is left */ }
  const focused = document.activeElement;
  const area = element("textarea", { class: "sr", readonly: "", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  let good = false;
  try { good = document.execCommand("copy"); } catch { /* said by the caller */ }
  area.remove();
  focused?.focus();
  return good;
}

/** Give the browser a file to save. */
export function saveFile(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
