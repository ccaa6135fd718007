"""The prompt side: prefixes that requests share, how much of their prompts a step reads, and reading it."""
