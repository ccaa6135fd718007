"""Load on a server that speaks OpenAI's protocol: who asks, what came back when, and the figures of it."""
