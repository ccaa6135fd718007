"""The HTTP side of the server, for any route: connections, bodies, keys, limits, errors, probes."""
