"""A pair on prompts: data sets, scores of answers, and speed with and without the drafter."""
