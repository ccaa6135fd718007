"""Loading a pair: models and tokenizers from checkpoints, drafters from names or modules, and a check of both."""
