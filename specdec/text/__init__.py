"""Text in and out: prompts to token ids, and token ids to text as they arrive."""
