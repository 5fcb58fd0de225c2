// The prefix tree as it hangs: each node a block as wide as its share of the pages below its parent, one row a level.

import { $ } from "./client.js";

const ROW = 15, GAP = 2, MAX_ROWS = 8;

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
    blocks.push({ left, width, depth: above ? above.depth + 1 : 0, held: holders > 0, pages });
  });
  return blocks;
}

/** Draw what the engine said last. */
export function drawTree(nodes) {
  const canvas = $("tree"), blocks = layOut(nodes).filter((block) => block.depth < MAX_ROWS);
  const width = canvas.clientWidth, rows = Math.max(1, ...blocks.map((block) => block.depth + 1));
  $("tree-note").textContent = nodes.length
    ? `Prefix tree: ${nodes.length} nodes, ${nodes.filter((node) => node[2]).length} held`
    : "Prefix tree: empty";
  canvas.setAttribute("aria-label", $("tree-note").textContent);
  if (!width) return;
  const scale = devicePixelRatio || 1, height = nodes.length ? rows * ROW : 0;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.scale(scale, scale);
  for (const { left, width: share, depth, held } of blocks) {
    context.fillStyle = style.getPropertyValue(held ? "--accent" : "--cached");
    context.fillRect(left * width, depth * ROW, Math.max(1, share * width - GAP), ROW - GAP);
  }
}
