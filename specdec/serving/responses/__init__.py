"""OpenAI's Responses API over the chat route: input items, the answer as events, and stored responses."""
