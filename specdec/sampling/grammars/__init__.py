"""Grammars of an output (JSON schema, regular expression, choice), and token rules: masks of allowed tokens."""
