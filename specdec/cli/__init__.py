"""The command line: app.py is the program, commands.py declares commands and their options, and actions/ holds their
functions."""
