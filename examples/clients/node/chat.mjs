// A streamed answer and JSON by a schema, with the openai package of npm.
// Run: quire serve, then: npm install && npm start (QUIRE_URL, if it is not http://127.0.0.1:8000)
import assert from "node:assert";
import OpenAI from "openai";

const url = (process.env.QUIRE_URL ?? "http://127.0.0.1:8000") + "/v1";
const client = new OpenAI({baseURL: url, apiKey: "none"});
const model = (await client.models.list()).data[0].id;

const stream = await client.chat.completions.create({
  model,
  messages: [{role: "user", content: "How many minutes are in 3 hours?"}],
  temperature: 0,
  max_tokens: 64,
  stream: true,
});
let answer = "";
for await (const chunk of stream) {
  const text = chunk.choices[0]?.delta?.content ?? "";
  answer += text;
  process.stdout.write(text);
}
process.stdout.write("\n");
assert(answer);

const schema = {
  type: "object",
  properties: {name: {type: "string", maxLength: 20}, age: {type: "integer", minimum: 0, maximum: 130}},
  required: ["name", "age"],
  additionalProperties: false,
};
const done = await client.chat.completions.create({
  model,
  messages: [{role: "user", content: "Anna is 31 years old and lives in Oslo. Give name and age as JSON."}],
  response_format: {type: "json_schema", json_schema: {name: "person", schema, strict: true}},
  temperature: 0,
  max_tokens: 100,
});
const person = JSON.parse(done.choices[0].message.content);
assert.deepEqual(Object.keys(person).sort(), ["age", "name"]);
console.log(person);
