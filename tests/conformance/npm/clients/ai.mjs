// Vercel's ai over four of its providers: text, streams, tools in steps, objects of a schema.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { expect, give, model, same, sum, sumAnswer, text, v1, weather } from './shared.mjs';

const openai = createOpenAI({ baseURL: v1, apiKey: 'none' });
const compatible = createOpenAICompatible({
  name: 'quire', baseURL: v1, includeUsage: true, supportsStructuredOutputs: true,
});
const models = {
  responses: openai.responses(model),
  chat: openai.chat(model),
  compatible: compatible(model),
  anthropic: createAnthropic({ baseURL: v1, apiKey: 'none' })(model),
};
for (const [name, one] of Object.entries(models)) {
  const fields = { model: one, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
  await expect(`${name}, text`, async () => {
    const answer = await generateText({ ...fields, prompt: sum });
    return answer.usage.outputTokens > 1 && same(answer.text, sumAnswer);
  });
  await expect(`${name}, stream`, async () => {
    const answer = streamText({ ...fields, prompt: sum, onError: ({ error }) => { throw error; } });
    let said = '';
    for await (const piece of answer.textStream) said += piece;
    return (await answer.usage).outputTokens > 1 && same(said, sumAnswer);
  });
  await expect(`${name}, tools`, async () => {
    const asked = [];
    const execute = async (found) => (asked.push(found), text);
    const inputSchema = z.object({ city: z.string() });
    const tools = { get_weather: tool({ description: 'Get the weather of a city', inputSchema, execute }) };
    const answer = await generateText({ ...fields, prompt: weather, tools, stopWhen: stepCountIs(3) });
    return Boolean(answer.text) && same([asked, answer.steps.length], [[{ city: 'Paris' }], 2]);
  });
  await expect(`${name}, object`, async () => {
    const person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
    const prompt = 'Extract name and age as JSON: Bob is 31 years old.';
    return same((await generateObject({ ...fields, prompt, schema: person })).object, { name: 'Bob', age: 31 });
  });
}
give();
