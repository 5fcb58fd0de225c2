// @anthropic-ai/sdk: messages, streams, tools, its runner of tools, and its threads.
import Anthropic from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { z } from 'zod';
import { base, expect, give, model, same, schema, sum, sumAnswer, text, weather } from './shared.mjs';

const client = new Anthropic({ baseURL: base, apiKey: 'none', maxRetries: 0 });
const fields = { model, max_tokens: 60, temperature: 0 };
const asks = (content) => [{ role: 'user', content }];

await expect('chat', async () => {
  const answer = await client.messages.create({ ...fields, messages: asks(sum) });
  return answer.usage.output_tokens > 1 && same(answer.content[0].text, sumAnswer);
});
await expect('stream', async () => {
  let said = '';
  const stream = client.messages.stream({ ...fields, messages: asks(sum) }).on('text', (piece) => (said += piece));
  return same([await stream.finalText(), said], [sumAnswer, sumAnswer]);
});
await expect('tool', async () => {
  const tools = [{ name: 'get_weather', input_schema: schema }];
  const answer = await client.messages.create({ ...fields, messages: asks(weather), tools, tool_choice: { type: 'any' } });
  return same(answer.content.at(-1).input, { city: 'Paris' });
});
for (const stream of [false, true]) {
  await expect(`toolRunner, stream ${stream}`, async () => {
    const asked = [];
    const run = (found) => (asked.push(found), text);
    const inputSchema = z.object({ city: z.string() });
    const tools = [betaZodTool({ name: 'get_weather', description: 'Get the weather of a city', inputSchema, run })];
    const runner = client.beta.messages.toolRunner({ ...fields, stream, tools, messages: asks(weather), max_iterations: 3 });
    const last = await runner.runUntilDone();
    return Boolean(last.content.at(-1).text) && same(asked, [{ city: 'Paris' }]);
  });
}
await expect('thread', async () => {
  const thread = client.beta.messages.thread(fields);
  const said = [];
  for (const question of [sum, 'What is 2 + 3?', sum])
    said.push((await thread.send({ role: 'user', content: question })).content[0].text);
  return said.every(Boolean) && same([said[0], thread.messages.length], [sumAnswer, 6]);
});
give();
