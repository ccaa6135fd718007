"""A round from its request to its tokens: who runs, what is launched, what a request takes over."""
