"""Training of drafters: answers of the target, packed rows, training-time test, and checkpoints for an engine."""
