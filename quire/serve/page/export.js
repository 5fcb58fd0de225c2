// A conversation as a file: JSON for programs, Markdown for people.

import { saveFile } from "./dom.js";

export function asJson(talk, messages) {
  const plain = messages.map(({ role, content, reasoning, calls, model, time }) => ({
    role, content, ...(calls ? { tool_calls: calls.map(({ id, name, arguments: given, answer }) => ({ id, type: "function", function: { name, arguments: given }, answer })) } : {}), ...(reasoning ? { reasoning_content: reasoning } : {}), ...(model ? { model } : {}), time: new Date(time).toISOString(),
  }));
  return JSON.stringify({ title: talk.title, created: new Date(talk.created).toISOString(), messages: plain }, null, 2) + "\n";
}

export function asMarkdown(talk, messages) {
  const parts = [`# ${talk.title}`];
  for (const { role, content, reasoning, calls, model } of messages) {
    parts.push(`## ${role === "user" ? "You" : model || "Answer"}`);
    if (reasoning) parts.push(reasoning.trim().split("\n").map((line) => `> ${line}`.trimEnd()).join("\n"));
    if (content.trim()) parts.push(content.trim());
    for (const call of calls ?? []) parts.push(`Calls \`${call.name}\`:`, fenced(call.arguments), ...(call.answer === undefined ? [] : ["Answer:", fenced(call.answer)]));
  }
  return parts.join("\n\n") + "\n";
}

function fenced(text) {
  const mark = text.includes("```") ? "~~~~" : "```";
  return `${mark}\n${text}\n${mark}`;
}

export function saveTalk(talk, messages, kind) {
  const name = talk.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
  if (kind === "json") saveFile(name + ".json", asJson(talk, messages), "application/json");
  else saveFile(name + ".md", asMarkdown(talk, messages), "text/markdown");
}
