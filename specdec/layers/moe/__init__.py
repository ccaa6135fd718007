"""A mixture of experts: routing, the products of the chosen experts, and their weighted sum."""
