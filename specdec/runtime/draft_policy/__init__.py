"""Which draft a round has: what rounds take, what drafts bring, and an account that bounds what wrong ones lose."""
