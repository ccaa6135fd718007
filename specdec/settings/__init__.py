"""How settings are declared: options of the shell, numbers with bounds, and values of numpy and torch made plain."""
