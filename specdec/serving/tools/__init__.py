"""Tool calls and reasoning: parsed from text, and chosen by grammar."""
