// The live view of the engine: speed, counts and a map of the KV pages. Polls /v1/engine.

import { showStarters } from "./chat.js";
import { request, server } from "./client.js";
import { $, element } from "./dom.js";
import { drawExperts, expertAt } from "./experts.js";
import { adopt } from "./settings.js";
import { showTools } from "./tools.js";
import { drawTree, nodeAt } from "./tree.js";

const view = { samples: [], speeds: [], map: new Uint8Array(0), each: 1, pageSize: 0, tree: [], n_nodes: 0, experts: [], expertLayers: [], delay: 500 };
const SPEEDS = 120;

export function buildEngine() {
  pointed("map", pageAt);
  pointed("tree", (x, y) => nodeAt(x, y, view.pageSize));
  pointed("experts", expertAt);
}

/** Draw everything again: the size or the theme changed. */
export function drawAll() {
  if (!$("map").offsetParent) $("tip").hidden = true;
  drawSpark();
  drawMap();
  drawTree(view.tree, view.n_nodes);
  drawExperts(view.experts, view.expertLayers);
}

/** What the pointer stands on is named beside it; `told(x, y)` gives the words or "". */
function pointed(id, told) {
  const tip = $("tip"), hide = () => { tip.hidden = true; };
  const show = (event) => {
    const box = $(id).getBoundingClientRect(), words = told(event.clientX - box.left, event.clientY - box.top);
    tip.hidden = !words;
    if (!words) return;
    tip.replaceChildren(...words.split("\n").map((line) => element("div", {}, line)));
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
  };
  $(id).addEventListener("pointermove", show);
  $(id).addEventListener("pointerdown", show);
  $(id).addEventListener("pointerleave", hide);
}

export async function look() {
  if (!document.hidden) {
    try {
      const info = await (await request("v1/engine")).json();
      view.delay = 500;
      $("down").hidden = true;
      if ($("key-form").hidden === false && server.key) $("key-form").hidden = true;
      show(info);
    } catch (error) {
      view.delay = Math.min(view.delay * 1.5, 3000);
      trouble(error);
    }
  }
  setTimeout(look, view.delay);
}

function trouble(error) {
  const loading = error.status === 503;
  state(loading ? "wait" : "bad", error.status === 401 ? "locked" : loading ? "not ready" : "unreachable");
  $("down").hidden = error.status === 401;
  $("down").textContent = loading ? error.message : error.message + " Trying again…";
}

function state(kind, text) {
  const health = $("health");
  if (health.dataset.state !== kind) health.dataset.state = kind;
  if (health.textContent !== text) health.textContent = text;
}

function show(info) {
  const { stats } = info;
  const { engine } = info;
  const isNew = server.model !== info.model;
  server.model = info.model;
  server.capabilities = info.capabilities;
  if (isNew) { adopt(info.default_sampling, engine.max_model_len); showStarters(info.starter_prompts); showTools(); }
  server.room = engine.max_model_len;
  view.pageSize = engine.page_size;
  $("model").textContent = $("model").title = info.model;
  document.title = info.model + " · Quire";
  state(info.healthy ? "good" : "bad", info.healthy ? (stats.n_running ? "working" : "ready") : info.recovering ? "starting again" : "stalled");
  view.samples.push({ time: info.time_s, tokens: stats.generation_tokens });
  while (view.samples.length > 2 && info.time_s - view.samples[0].time > 2) view.samples.shift();
  const [from, to] = [view.samples[0], view.samples.at(-1)];
  const speed = to.time > from.time ? Math.max(0, (to.tokens - from.tokens) / (to.time - from.time)) : 0;
  view.speeds.push(speed);
  if (view.speeds.length > SPEEDS) view.speeds.shift();
  $("speed").textContent = speed >= 10000 ? (speed / 1000).toFixed(1) + "k" : String(Math.round(speed));
  $("running").textContent = stats.n_running;
  $("waiting").textContent = stats.n_waiting;
  const held = stats.n_pages - stats.n_pages_free;
  $("held").textContent = percent(held, stats.n_pages) ?? "0 %";
  $("hits").textContent = percent(stats.prefix_hits, stats.prefix_queries) ?? "–";
  $("drafts-note").textContent = inDrafts(stats);
  $("drafts-note").hidden = !stats.accepted_at.length;
  view.map = Uint8Array.from(atob(stats.page_map), (char) => char.charCodeAt(0));
  view.tree = stats.tree;
  view.n_nodes = stats.n_tree_nodes;
  view.experts = stats.expert_map;
  view.expertLayers = stats.expert_layers;
  $("map").setAttribute("aria-label", `Map of the KV pages: ${held} held, ${stats.n_pages_cached} cached, of ${stats.n_pages}`);
  const each = view.each = Math.ceil(stats.n_pages / Math.max(1, view.map.length));
  const many = each > 1 ? `, ${each} a cell,` : "";
  $("map-note").textContent = `${stats.n_pages.toLocaleString("en")} pages of ${engine.page_size} tokens${many} on ${engine.device}; ` +
    `context ${engine.max_model_len.toLocaleString("en")} tokens; Quire ${info.version}`;
  drawAll();
}

/** What drafts do for all requests, in one line; "" for an engine without drafts. */
function inDrafts({ accepted_at, n_drafts, draft_tokens, draft_saved_s }) {
  if (!accepted_at.length) return "";
  if (!n_drafts) return "Drafts: none verified yet";
  const right = accepted_at.reduce((sum, one) => sum + one, 0), saved = Math.abs(draft_saved_s).toFixed(1);
  return `Drafts: ${draft_tokens.toLocaleString("en")} verified, ${right.toLocaleString("en")} right (${percent(right, draft_tokens)}), ` +
    `${(right / n_drafts).toFixed(2)} a time; they ${draft_saved_s < 0 ? "cost" : "saved"} ${saved} s`;
}

function percent(part, whole) { return whole > 0 ? Math.round((100 * part) / whole) + " %" : null; }

/** A 2D context in CSS pixels, sharp on any screen. */
function canvas(id, height) {
  const surface = $(id), width = surface.clientWidth, scale = devicePixelRatio || 1;
  surface.style.height = height + "px";
  surface.width = Math.round(width * scale);
  surface.height = Math.round(height * scale);
  const context = surface.getContext("2d");
  context.scale(scale, scale);
  return { context, width };
}

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function drawSpark() {
  const height = 40, { context, width } = canvas("spark", height);
  if (!width) return;
  context.fillStyle = colour("--line");
  context.fillRect(0, height - 2, width, 1);
  const top = Math.max(10, ...view.speeds), step = width / (SPEEDS - 1), n = view.speeds.length;
  const point = (i) => [width - (n - 1 - i) * step, height - 2 - (view.speeds[i] / top) * (height - 6)];
  context.beginPath();
  view.speeds.forEach((_, i) => context.lineTo(...point(i)));
  context.strokeStyle = context.fillStyle = colour("--accent");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(point(0)[0], height);
  context.globalAlpha = 0.13;
  context.fill();
}

/** Colours of bookbinder's cloth, ordered so that neighbours differ. */
const BINDINGS = ["#c4543d", "#3f7fa6", "#cf9339", "#4f9a77", "#8a67b0", "#8f9a45", "#b35d8d", "#3f9aa0", "#a9744f", "#5b74c2", "#d0736c", "#6f8f5a"];

let grid = null; // of the map as it was drawn: {across, pitch, tall}

function pageAt(x, y) {
  if (!grid) return "";
  const across = Math.floor(x / grid.pitch), i = Math.floor(y / grid.tall) * grid.across + across;
  if (across >= grid.across || i < 0 || i >= view.map.length) return "";
  const owner = view.map[i], { each } = view;
  const name = each > 1 ? `Pages ${i * each} to ${(i + 1) * each - 1}` : `Page ${i}`;
  if (owner < 2) return `${name}\n${owner ? "cached: kept for a prompt that begins the same" : "free"}`;
  const held = view.map.reduce((sum, one) => sum + (one === owner), 0) * each;
  return `${name}\nheld by the request in slot ${owner - 2}, with ${held} page${held === 1 ? "" : "s"}`;
}

/** One small page for each page of the pool: free, cached, or the colour of the request that holds it. */
function drawMap() {
  const n = view.map.length, width = $("map").clientWidth;
  if (!width) return;
  if (!n) { canvas("map", 0); return; }  // the pages of an engine that is gone
  const gap = n > 1500 ? 1 : 2;
  let cell = 14;
  const rows = (size) => Math.ceil(n / Math.floor((width + gap) / (size + gap)));
  while (cell > 2 && rows(cell) * (cell * 1.25 + gap) > 230) cell -= 0.5;
  const across = Math.floor((width + gap) / (cell + gap)), pitch = (width + gap) / across, tall = cell * 1.25;
  grid = { across, pitch, tall: tall + gap };
  const { context } = canvas("map", Math.ceil(n / across) * (tall + gap));
  const fixed = [colour("--free"), colour("--cached")];
  const fills = new Map();
  for (let i = 0; i < n; i++) {
    const owner = view.map[i];
    if (!fills.has(owner)) fills.set(owner, []);
    fills.get(owner).push(i);
  }
  for (const [owner, pages] of fills) {
    context.fillStyle = fixed[owner] ?? BINDINGS[(owner - 2) % BINDINGS.length];
    for (const i of pages) context.fillRect((i % across) * pitch, Math.floor(i / across) * (tall + gap), pitch - gap, tall);
  }
}
