"""Which draft a round has: measured times, learned acceptance, a choice, and an account that bounds the loss."""
