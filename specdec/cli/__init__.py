"""The command line: one module a command; app.py declares them and imports a body when its command is run."""
