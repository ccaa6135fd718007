"""Drafters on disk: the config.json of every format, tensor files, and the reader of both."""
