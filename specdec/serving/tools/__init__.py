"""Tool calls and reasoning: parsed from text, or enforced by a grammar."""
