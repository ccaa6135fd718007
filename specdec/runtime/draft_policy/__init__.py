"""Chooses the draft of each round, from measured times and learned acceptance; an account bounds the loss."""
