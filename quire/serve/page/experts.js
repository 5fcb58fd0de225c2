// How evenly tokens go to the experts of a model: a row for each layer that has some, a cell for each expert.

import { $ } from "./dom.js";

const UNIT = 16, TALLEST = 160; // a cell's number for the mean load; CSS pixels
let drawn = { rows: [], layers: [], tall: 1, wide: 1 };

/** Draw `rows`, strings in base64 with a byte for each expert of a layer; nothing before there is a load. layers: the
    number of each in the model. */
export function drawExperts(rows, layers) {
  const canvas = $("experts"), note = $("experts-note");
  const loads = rows.map((row) => Uint8Array.from(atob(row), (char) => char.charCodeAt(0)));
  const busy = loads.filter((row) => row.some((load) => load));
  canvas.hidden = note.hidden = !busy.length;
  if (!busy.length) return;
  const most = Math.max(...busy.map((row) => Math.max(...row))) / UNIT;
  const idle = busy.reduce((sum, row) => sum + row.filter((load) => !load).length, 0);
  note.textContent = `Experts: ${loads.length} layer${loads.length === 1 ? "" : "s"} of ${loads[0].length}; ` +
    `the busiest has ${most.toFixed(1)} × the tokens of its layer's mean, ${idle} of all have hardly any`;
  canvas.setAttribute("aria-label", note.textContent);
  const width = canvas.clientWidth, tall = Math.max(1, Math.min(8, TALLEST / loads.length));
  drawn = { rows: loads, layers, tall, wide: width / loads[0].length };
  if (!width) return;
  const scale = devicePixelRatio || 1, height = Math.ceil(loads.length * tall);
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  loads.forEach((row, layer) => row.forEach((load, expert) => {
    context.globalAlpha = Math.min(1, load / (3 * UNIT));
    context.fillRect(expert * drawn.wide, layer * tall, drawn.wide, tall);
  }));
}

/** The expert at a place of the drawing, in words; "" where there is none. */
export function expertAt(x, y) {
  const layer = Math.floor(y / drawn.tall), expert = Math.floor(x / drawn.wide), load = drawn.rows[layer]?.[expert];
  if (load === undefined) return "";
  const times = load === 255 ? "16 or more" : (load / UNIT).toFixed(1);
  return `Expert ${expert} of layer ${drawn.layers[layer]}\n${times} × the tokens of the mean one`;
}
