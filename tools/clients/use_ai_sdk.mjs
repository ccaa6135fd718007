// Vercel's AI SDK with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import { QUESTION, run } from "./checks.mjs";

const of = (url, model) => createOpenAICompatible({ name: "specdec", baseURL: url, apiKey: "none", supportsStructuredOutputs: true })(model);
const schema = z.object({ number: z.literal(8) }).strict();
const text = (ok, what) => { if (!ok) throw new Error(`no ${what}`); };

await run({
  chat: async (url, model) => text((await ai.generateText({ model: of(url, model), prompt: QUESTION, maxOutputTokens: 12, maxRetries: 0 })).text, "text"),
  stream: async (url, model) => {
    let all = "";
    for await (const part of ai.streamText({ model: of(url, model), prompt: QUESTION, maxOutputTokens: 12, maxRetries: 0 }).textStream) all += part;
    text(all, "text");
  },
  structured: async (url, model) => {
    const made = await ai.generateText({ model: of(url, model), output: ai.Output.object({ schema }), prompt: QUESTION, maxRetries: 0 });
    text(made.output.number === 8, "number");
  },
  tools: async (url, model) => {
    const tools = { answer: ai.tool({ description: "Say it.", inputSchema: schema }) };
    const made = await ai.generateText({ model: of(url, model), tools, toolChoice: "required", prompt: QUESTION, maxRetries: 0 });
    text(made.toolCalls.length === 1, "call");
  },
});
