"""The bodies of the shell's commands, a module each; specdec/cli.py declares their options and loads them when run."""
