"""Measurements of an engine: benchmarks, accuracy, scoring, reports."""
