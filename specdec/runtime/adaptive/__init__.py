"""Which drafts pay: shapes, what they cost, what they bring, and the choice of each round."""
