"""The HTTP side of the server for all routes: bodies, keys, limits, errors, probes."""
