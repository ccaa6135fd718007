"""Training of drafters: the target's own answers, packed rows, training-time test, a checkpoint for an engine."""
