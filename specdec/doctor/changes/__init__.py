"""Changes of a pair, one kind of drafter or of prompts a file: what the table of causes tries."""
