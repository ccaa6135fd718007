"""Drafters on disk: config.json of every format, tensor files, and the one reader of both."""
