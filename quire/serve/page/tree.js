// The prefix tree as it hangs: each node a block as wide as its share of the pages below its parent, one row a level.

import { $ } from "./dom.js";

const ROW = 15, GAP = 2, MAX_ROWS = 8;
let drawn = []; // the blocks of the last drawing, in CSS pixels

/** Lay `nodes` ([parent or -1, pages, holders], parents first) out in a unit square: [{left, width, depth, held}]. */
export function layOut(nodes) {
  const weight = nodes.map(([, pages]) => pages);
  for (let i = nodes.length - 1; i >= 0; i--) if (nodes[i][0] >= 0) weight[nodes[i][0]] += weight[i];
  const total = nodes.reduce((sum, [parent], i) => sum + (parent < 0 ? weight[i] : 0), 0);
  const used = nodes.map(() => 0), blocks = [];
  let top = 0;
  nodes.forEach(([parent, pages, holders], i) => {
    const above = blocks[parent];
    const width = above ? above.width * weight[i] / (weight[parent] || 1) : weight[i] / (total || 1);
    const left = above ? above.left + used[parent] : top;
    if (above) used[parent] += width; else top += width;
    blocks.push({ left, width, depth: above ? above.depth + 1 : 0, holders, pages, below: weight[i] - pages });
  });
  return blocks;
}

function summary(nodes, n_nodes, n_deeper) {
  if (!nodes.length) return "Prefix tree: empty";
  const held = nodes.filter((node) => node[2]).length;
  const told = n_nodes > nodes.length ? `the ${nodes.length} heaviest of ${n_nodes.toLocaleString("en")} nodes` : `${nodes.length} node${nodes.length === 1 ? "" : "s"}`;
  return `Prefix tree: ${told}, ${held} held` + (n_deeper ? `; ${n_deeper} below level ${MAX_ROWS} are not drawn` : "");
}

/** Draw what the engine said last; `n_nodes` counts those too that it had no room for. */
export function drawTree(nodes, n_nodes) {
  const canvas = $("tree"), all = layOut(nodes), blocks = all.filter((block) => block.depth < MAX_ROWS);
  const width = canvas.clientWidth, rows = Math.max(1, ...blocks.map((block) => block.depth + 1));
  $("tree-note").textContent = summary(nodes, n_nodes, all.length - blocks.length);
  canvas.setAttribute("aria-label", $("tree-note").textContent);
  drawn = [];
  if (!width) return;
  const scale = devicePixelRatio || 1, height = nodes.length ? rows * ROW : 0;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.scale(scale, scale);
  blocks.sort((a, b) => a.width - b.width); // where many fall on one pixel, the heaviest is seen
  for (const block of blocks) {
    const x = block.left * width, wide = Math.max(1, block.width * width - GAP);
    context.fillStyle = style.getPropertyValue(block.holders ? "--accent" : "--cached");
    context.fillRect(x, block.depth * ROW, wide, ROW - GAP);
    drawn.push({ ...block, x, wide });
  }
}

/** The node at a place of the drawing, in words; "" where there is none. */
export function nodeAt(x, y, pageSize) {
  const depth = Math.floor(y / ROW);
  const block = drawn.findLast((each) => each.depth === depth && x >= each.x && x < each.x + each.wide + GAP);
  if (!block) return "";
  const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
  const below = block.below ? `; below it ${count(block.below, "page")}` : "";
  return `Node at level ${block.depth + 1}: ${count(block.pages, "page")}, ${count(block.pages * pageSize, "token")}${below}\n` +
    (block.holders ? `held by ${count(block.holders, "sequence")}` : "cached, held by none");
}
