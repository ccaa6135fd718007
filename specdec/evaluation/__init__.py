"""What stands on the engine and measures it: benchmarks, accuracy, scoring, reports."""
