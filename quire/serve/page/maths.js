// Formulas between $, $$, \( and \[. Temml makes MathML of them, DOMPurify lets through what is on the list below, and a formula
// that cannot be read stays as it was written. The library (480 kB) is fetched when the first formula appears.

import DOMPurify from "./vendor/purify.es.mjs";

const TAGS = ["math", "menclose", "merror", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom", "mprescripts", "mroot", "mrow", "ms",
  "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "none", "span"];
const ATTRIBUTES = ["accent", "accentunder", "class", "columnalign", "columnlines", "columnspan", "columnspacing", "depth", "display", "displaystyle", "fence", "form",
  "height", "largeop", "linethickness", "lspace", "mathbackground", "mathcolor", "mathvariant", "maxsize", "minsize", "movablelimits", "notation",
  "rowalign", "rowlines", "rowspacing", "rowspan", "rspace", "scriptlevel", "separator", "stretchy", "symmetric", "voffset", "width"];
const CLEAN = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };
/** Of what Temml writes into style attributes, which the content security policy forbids as such. */
const STYLES = /^(?:color|background-color|text-align|width|margin-left|margin-right|(?:padding|border)(?:-(?:top|right|bottom|left))?)$/;
/** `maxSize`: most that a length may be, [in em, in points]; a formula that multiplies itself by macros ends at `maxExpand`. */
const LIMITS = { throwOnError: true, trust: false, maxSize: [20, 240], maxExpand: 300 };
const MAX_CHARS = 10_000, MAX_KEPT = 500, SLICE_MS = 30;

/** Style attributes come under this name: under their own the browser would refuse each of them aloud. */
const LOOK = "data-look";
let looks = null; // [element, style] of the formula that is being cleaned
DOMPurify.addHook("uponSanitizeAttribute", (node, attribute) => { if (looks && attribute.attrName === LOOK) looks.push([node, attribute.attrValue]); });

export function escaped(text) { return text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`); }

/** Until it is typeset, a formula is the text that was written: Markdown would take its backslashes and underscores for its own. */
const formula = (name, level, start, rule) => ({
  name, level,
  start: (text) => { const at = text.search(start); return at < 0 ? undefined : at; },
  tokenizer: (text) => { const found = rule.exec(text); return found ? { type: name, raw: found[0], text: found[0].trim() } : undefined; },
  renderer: ({ text }) => {
    const lead = /^(?:\$\$|\\\[)/.test(text), shown = `<span class="maths${lead ? " lead" : ""}">${escaped(text)}</span>`;
    return level === "block" ? `<p>${shown}</p>` : shown;
  },
});

/** Extensions of `marked`. A single dollar is a formula's only where no price is meant: "$5 and $6" are prices. */
export const FORMULAS = [
  formula("maths", "block", /^ {0,3}(?:\$\$|\\\[)/m, /^ {0,3}(?:\$\$(?:\\[^]|[^\\$])+\$\$|\\\[[^]+?\\\])[ \t]*(?:\n|$)/),
  formula("formula", "inline", /\\[([]|(?<![\w\\$])\$/,
    /^(?:\\\([^\n]+?\\\)|\\\[[^\n]+?\\\]|\$\$(?:\\[^\n]|[^\\$\n])+\$\$|\$(?=[^\s$])(?:\\[^\n]|[^\\$\n])+(?<!\s)\$(?![\w$]))/),
];

let library = null;
const made = new Map(); // source → its formula, or the reason why there is none: a growing text has the same ones again and again

/** Typeset the formulas in `nodes`, in slices, so that the page stays quick. Resolves to true if there were any. */
export async function typeset(nodes) {
  const places = nodes.flatMap((node) => node.querySelectorAll ? [...node.querySelectorAll(".maths")] : []);
  if (!places.length) return false;
  library ??= import("./vendor/temml.mjs").then((module) => module.default);
  let began = performance.now();
  const temml = await library.catch(() => { library = null; });
  if (!temml) return false; // the server went away; formulas stay as they were written
  for (const place of places) {
    if (performance.now() - began > SLICE_MS) {
      await new Promise((resolve) => setTimeout(resolve));
      began = performance.now();
    }
    if (place.isConnected) put(temml, place);
  }
  return true;
}

function put(temml, place) {
  const source = place.textContent;
  if (!made.has(source)) {
    if (made.size >= MAX_KEPT) made.delete(made.keys().next().value);
    made.set(source, read(temml, source));
  }
  const found = made.get(source);
  if (typeof found === "string") { place.title = found; return; }
  place.replaceChildren(found.cloneNode(true));
  place.classList.add("typeset");
}

/** MathML of a formula with its marks, or in words why there is none. */
function read(temml, source) {
  const n = source.startsWith("$") && !source.startsWith("$$") ? 1 : 2, displayMode = source.startsWith("$$") || source.startsWith("\\[");
  if (source.length > MAX_CHARS) return "This formula is too long to be typeset.";
  try {
    const markup = temml.renderToString(source.slice(n, -n).trim(), { ...LIMITS, displayMode, wrap: displayMode ? "none" : "tex" });
    looks = [];
    const clean = DOMPurify.sanitize(markup.replaceAll(' style="', ` ${LOOK}="`), CLEAN), found = looks;
    for (const [node, style] of found) dress(node, style);
    return clean.querySelector("math") ? clean : "This formula cannot be typeset.";
  } catch (error) {
    return `Not typeset: ${String(error.message).replace(/\u0332/g, "").trim()}`;
  } finally { looks = null; }
}

function dress(node, style) {
  for (const rule of style.split(";")) {
    const [name, value] = rule.split(":");
    if (value && STYLES.test(name.trim())) node.style?.setProperty(name.trim(), value.trim());
  }
}
