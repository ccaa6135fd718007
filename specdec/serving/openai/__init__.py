"""OpenAI's routes: chat completions, completions, models, tokenize."""
