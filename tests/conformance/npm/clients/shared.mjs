// What the scripts share: the server, the questions, a tool, and how results are given back.
// The last line is a JSON object: true for what holds, and what was found instead for what does not.
export const base = process.argv[2];
export const v1 = base + '/v1';
export const model = 'demo';
export const sum = 'What is 23 + 45?';
export const sumAnswer = '23 + 45 = 68.';
export const weather = 'What is the weather in Paris?';
export const schema = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
export const text = 'clear, 21 degrees';
const results = {};

export async function expect(name, run) {
  try {
    results[name] = await run();
  } catch (error) {
    results[name] = `${error?.name}: ${error?.message}`;
  }
}

export const same = (found, wanted) =>
  JSON.stringify(found) === JSON.stringify(wanted) || { found, wanted };

export const give = () => console.log('\n' + JSON.stringify(results));
