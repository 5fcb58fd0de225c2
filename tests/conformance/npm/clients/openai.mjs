// openai: chat, streams, its runner of tools, responses.
import OpenAI from 'openai';
import { expect, give, model, same, schema, sum, sumAnswer, text, v1, weather } from './shared.mjs';

const client = new OpenAI({ baseURL: v1, apiKey: 'none', maxRetries: 0 });
const greedy = { model, temperature: 0, max_tokens: 60 };
const messages = [{ role: 'user', content: sum }];

await expect('chat', async () => {
  const answer = await client.chat.completions.create({ ...greedy, messages });
  return answer.usage.completion_tokens > 1 && same(answer.choices[0].message.content, sumAnswer);
});
await expect('stream', async () => {
  let said = '', usage;
  for await (const chunk of await client.chat.completions.create({
    ...greedy, messages, stream: true, stream_options: { include_usage: true },
  })) {
    said += chunk.choices[0]?.delta?.content ?? '';
    usage = chunk.usage ?? usage;
  }
  return usage.completion_tokens > 1 && same(said, sumAnswer);
});
for (const stream of [false, true]) {
  await expect(`runTools, stream ${stream}`, async () => {
    const asked = [];
    const parse = JSON.parse, run = (found) => (asked.push(found), text);
    const fn = { name: 'get_weather', description: 'Get the weather of a city', parameters: schema, parse, function: run };
    const tools = [{ type: 'function', function: fn }];
    const runner = client.chat.completions.runTools({
      ...greedy, stream, tools, messages: [{ role: 'user', content: weather }],
    });
    return Boolean(await runner.finalContent()) && same(asked, [{ city: 'Paris' }]);
  });
}
const responding = { model, temperature: 0, max_output_tokens: 60 };
await expect('responses', async () =>
  same((await client.responses.create({ ...responding, input: sum })).output_text, sumAnswer));
await expect('responses, stream', async () =>
  same((await client.responses.stream({ ...responding, input: sum }).finalResponse()).output_text, sumAnswer));
await expect('responses, tool', async () => {
  const tools = [{ type: 'function', name: 'get_weather', parameters: schema, strict: true }];
  const answer = await client.responses.create({ ...responding, input: weather, tools, tool_choice: 'required' });
  return same(JSON.parse(answer.output[0].arguments), { city: 'Paris' });
});
give();
