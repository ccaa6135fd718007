"""Draft trees: their fields, how they grow, and the walk down the accepted path."""
