"""Trees of drafts: what they are, how they grow, and the walk down the accepted path."""
