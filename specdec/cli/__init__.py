"""The command line: app.py names the commands, commands.py declares their options, and actions/ holds their
functions."""
