"""OpenAI's Responses API over the chat route: what came in as items, the answer as events, stored responses."""
