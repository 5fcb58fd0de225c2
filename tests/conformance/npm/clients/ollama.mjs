// ollama: chat, streams, tools, vectors, lists.
import { Ollama } from 'ollama';
import { base, expect, give, model, same, schema, sum, sumAnswer, weather } from './shared.mjs';

const client = new Ollama({ host: base });
const fields = { model, options: { temperature: 0 } };
const messages = [{ role: 'user', content: sum }];

await expect('chat', async () => same((await client.chat({ ...fields, messages })).message.content, sumAnswer));
await expect('stream', async () => {
  let said = '';
  for await (const part of await client.chat({ ...fields, messages, stream: true })) said += part.message.content;
  return same(said, sumAnswer);
});
await expect('tools', async () => {
  const fn = { name: 'get_weather', description: 'Get the weather of a city', parameters: schema };
  const ask = { messages: [{ role: 'user', content: weather }], tools: [{ type: 'function', function: fn }] };
  const { message } = await client.chat({ ...fields, ...ask });
  return same(message.tool_calls[0].function.arguments, { city: 'Paris' });
});
await expect('generate', async () => Boolean((await client.generate({ ...fields, prompt: sum })).response));
await expect('list', async () => same((await client.list()).models.map((one) => one.name), ['demo:latest']));
await expect('embed', async () => same((await client.embed({ model, input: ['a', 'b'] })).embeddings.length, 2));
await expect('show', async () => (await client.show({ model })).capabilities.includes('tools'));
give();
