// OpenAI's own client in JavaScript.
import OpenAI from "openai";
import { NUMBER, QUESTION, run } from "./checks.mjs";

const messages = [{ role: "user", content: QUESTION }];
const of = (url) => new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const text = (ok, what) => { if (!ok) throw new Error(`no ${what}`); };

await run({
  chat: async (url, model) => {
    const made = await of(url).chat.completions.create({ model, messages, max_tokens: 12 });
    text(made.choices[0].message.content, "text");
  },
  stream: async (url, model) => {
    const stream = of(url).chat.completions.stream({ model, messages, max_tokens: 12, stream_options: { include_usage: true } });
    text((await stream.finalChatCompletion()).choices[0].message.content, "text");
  },
  tools: async (url, model) => {
    const tools = [{ type: "function", function: { name: "answer", parameters: NUMBER } }];
    const made = await of(url).chat.completions.create({ model, messages, tools, tool_choice: "required", parallel_tool_calls: false });
    text(JSON.parse(made.choices[0].message.tool_calls[0].function.arguments).number, "number");
  },
  structured: async (url, model) => {
    const response_format = { type: "json_schema", json_schema: { name: "n", schema: NUMBER, strict: true } };
    const made = await of(url).chat.completions.parse({ model, messages, response_format });
    text(JSON.parse(made.choices[0].message.content).number, "number");
  },
  responses: async (url, model) => {
    const stream = of(url).responses.stream({ model, input: QUESTION, max_output_tokens: 100 });
    text((await stream.finalResponse()).output_text, "text");
  },
});
