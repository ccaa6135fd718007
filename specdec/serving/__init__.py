"""Many callers at once: an engine for asyncio, and an OpenAI-compatible server over it."""
