// A chat, a stream, a tool and an answer by a schema, of OpenAI's own client and one of its APIs: a
// line each.
import OpenAI, { NotFoundError } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [address, api] = process.argv.slice(-2);
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "any", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const prompt = "My cat is called Milo. What is my cat called?";
const weather = ({ city }) => `Rain in ${city}.`;
const described = {
  name: "get_weather",
  description: "The weather of a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const pet = z.object({ kind: z.enum(["cat", "dog"]), legs: z.literal(4) });

async function chat() {
  const asked = { model, messages: [{ role: "user", content: prompt }] };
  console.log((await client.chat.completions.create(asked)).choices[0].message.content);
  const stream = client.chat.completions.stream(asked);
  console.log(await stream.finalContent());
  const run = { ...described, parse: JSON.parse, function: weather };
  const runner = client.chat.completions.runTools({
    ...asked,
    tools: [{ type: "function", function: run }],
  });
  console.log(await runner.finalContent());
  const response_format = zodResponseFormat(pet, "pet");
  const parsed = await client.chat.completions.parse({ ...asked, response_format });
  console.log(JSON.stringify(parsed.choices[0].message.parsed));
}

async function responses() {
  const asked = { model, input: prompt };
  console.log((await client.responses.create(asked)).output_text);
  console.log((await client.responses.stream(asked).finalResponse()).output_text);
  const tools = [{ type: "function", strict: false, ...described }];
  const called = await client.responses.create({ ...asked, tools });
  const call = called.output.find((item) => item.type === "function_call");
  const output = weather(JSON.parse(call.arguments));
  const result = { type: "function_call_output", call_id: call.call_id, output };
  const input = [{ role: "user", content: prompt }, ...called.output, result];
  console.log((await client.responses.create({ model, input, tools })).output_text);
  const text = { format: zodTextFormat(pet, "pet") };
  console.log(JSON.stringify((await client.responses.parse({ ...asked, text })).output_parsed));
}

await { chat, responses }[api]();
const { data } = await client.embeddings.create({ model, input: ["a cat", "a dog"] });
if (data.length !== 2 || !data[0].embedding.length) throw new Error("no embeddings");
const refused = await client.chat.completions
  .create({ model: "none", messages: [{ role: "user", content: prompt }] })
  .catch((error) => error);
if (!(refused instanceof NotFoundError)) throw new Error(`no NotFoundError: ${refused}`);
