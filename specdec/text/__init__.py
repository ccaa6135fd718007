"""Text in and out: prompts to token ids, token ids to text as they come."""
