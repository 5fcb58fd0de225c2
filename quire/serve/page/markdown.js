// A model's Markdown as nodes. `marked` reads it, DOMPurify lets through what is on the list below, highlight.js colours code.
// Raw HTML in an answer is shown as the text that it is, but for a few tags without attributes. No image is loaded.

import DOMPurify from "./vendor/purify.es.mjs";
import { Marked } from "./vendor/marked.esm.js";
import { copyText, element } from "./dom.js";
import { FORMULAS, escaped, typeset } from "./maths.js";

const TAGS = ["p", "br", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td",
  "h1", "h2", "h3", "h4", "h5", "h6", "hr", "a", "span", "input", "sub", "sup", "kbd", "mark", "u"];
const ATTRIBUTES = ["href", "title", "class", "align", "start", "type", "checked", "disabled"];
const CLEAN = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i, ADD_URI_SAFE_ATTR: ["align", "start", "type"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };
const BARE_TAG = /^<\/?(?:br|sub|sup|kbd|mark|u)\s*\/?>$/i;
const CLASS = /^(?:hljs-[a-z_-]+|(?:function|class|inherited|constant)_|language-[\w+#.-]+|maths|lead|math(?:cal|scr)|tml-[a-z0-9-]+|(?:chr|wbk|ff)-[a-z-]+|menclose|(?:up|down)strike|sout|longdiv-(?:top|arc)|circle-pad|textcircle|actuarial|phasor-(?:bottom|angle)|special-fraction)$/;

DOMPurify.addHook("uponSanitizeAttribute", (_, attribute) => {
  if (attribute.attrName === "class") attribute.attrValue = attribute.attrValue.split(/\s+/).filter((name) => CLASS.test(name)).join(" ");
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") { node.setAttribute("target", "_blank"); node.setAttribute("rel", "noopener noreferrer nofollow"); }
  if (node.tagName === "INPUT") { node.setAttribute("type", "checkbox"); node.setAttribute("disabled", ""); node.setAttribute("aria-label", node.checked ? "done" : "to do"); }
});

const reader = new Marked({
  gfm: true,
  renderer: {
    html: ({ text, block }) => BARE_TAG.test(text.trim()) ? text : block ? `<p>${escaped(text.trimEnd())}</p>` : escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || "image")}</a>`,
  },
  extensions: FORMULAS,
});

/** Nodes of one top-level token. Whatever `marked` makes of it passes the sanitiser. */
function nodesOf(token, links) {
  const list = [token];
  list.links = links;
  const fragment = DOMPurify.sanitize(reader.parser(list), CLEAN);
  for (const block of fragment.querySelectorAll("pre")) block.replaceWith(codeBlock(block));
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return [...fragment.childNodes];
}

// ---------------------------------------------------------------- code

function codeBlock(block) {
  const code = block.querySelector("code") ?? element("code", {}, block.textContent);
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const copy = element("button", { type: "button", class: "text", "aria-label": "Copy this code" }, "Copy");
  copy.addEventListener("click", () => copyText(code.textContent.replace(/\n$/, ""), copy));
  code.className = "";
  const inner = element("pre", { tabindex: "0" }, code);
  return element("figure", { class: "code", "data-language": language }, element("figcaption", {}, element("span", {}, language || "text"), copy), inner);
}

let highlighter = null;

/** Colour finished code. The library (129 kB) is fetched when the first code with a language appears. */
async function colour(nodes) {
  const blocks = nodes.filter((node) => node.dataset?.language && !node.dataset.coloured);
  for (const node of nodes) if (node.querySelectorAll) blocks.push(...[...node.querySelectorAll("figure.code")].filter((each) => each.dataset.language && !each.dataset.coloured));
  if (!blocks.length) return;
  highlighter ??= import("./vendor/highlight.min.js").then((module) => module.default);
  const library = await highlighter.catch(() => { highlighter = null; });
  if (!library) return; // the server went away; the code stays as it is
  for (const block of blocks) {
    const { language } = block.dataset, code = block.querySelector("code");
    block.dataset.coloured = "yes";
    if (!library.getLanguage(language) || code.textContent.length > 100_000) continue;
    code.replaceChildren(DOMPurify.sanitize(library.highlight(code.textContent, { language, ignoreIllegals: true }).value, CLEAN));
  }
}

// ---------------------------------------------------------------- a growing text

const UNSETTLED = 4; // blocks at the end that more text may still change
const isShown = (token) => token.type !== "space" && token.type !== "def";

/**
 * Renders a text that grows at its end. Only the last blocks are read again, and only those that changed are made again:
 * a long answer stays quick, and a selection stays. When the text is done it is read once more as a whole.
 */
export class GrowingText {
  constructor(target) {
    this.target = target;
    this.blocks = [];
    this.settled = 0; // characters that are not read again,
    this.fixed = 0; // and the blocks that they are
    this.links = this.whole = "{}"; // link references that the blocks were made with: in the last reading, and in a whole one
  }

  /** `done`: no more will come, so that the last block is finished too. */
  show(text, done = false) {
    const source = text.replace(/\r\n?/g, "\n");
    if (done) this.settled = this.fixed = 0;
    const tokens = reader.lexer(source.slice(this.settled)), kept = tokens.filter(isShown), links = JSON.stringify(tokens.links);
    let same = this.fixed;
    if (links === (done ? this.whole : this.links)) while (same - this.fixed < kept.length && this.blocks[same]?.raw === kept[same - this.fixed].raw) same++;
    for (const old of this.blocks.splice(same)) for (const node of old.nodes) node.remove();
    for (const token of kept.slice(same - this.fixed)) {
      const nodes = nodesOf(token, tokens.links);
      this.target.append(...nodes);
      this.blocks.push({ raw: token.raw, nodes });
      typeset(nodes).then((any) => { if (any) this.target.dispatchEvent(new Event("grown", { bubbles: true })); });
    }
    this.links = links;
    if (done) this.whole = links;
    const finished = done ? this.blocks : this.blocks.slice(0, -1);
    for (const block of finished) if (!block.finished) { block.finished = true; colour(block.nodes); }
    if (!done) this.settle(tokens);
  }

  settle(tokens) {
    for (const token of tokens.slice(0, -UNSETTLED)) {
      this.settled += token.raw.length;
      if (isShown(token)) this.fixed++;
    }
  }
}
