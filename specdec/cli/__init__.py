"""The command line: app.py names the commands, commands.py declares what they take, bodies/ is what they do."""
