"""The host's part: who runs, one step after the other, and what a request takes over from each."""
