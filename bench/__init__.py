"""Benchmarks for developers: one table of cases, one runner, one verifier, one report. Not part of the wheel.

registry.py    the cases: what each measures, at which shapes, formats and batch sizes, and what it is compared with
__main__.py    `python -m bench NAME...`: options, then the parts of each case
clock.py       times: replayed captures over inputs that exceed the L2, the wall clock, floors
verify.py      bits and values against a reference
report.py      rows, printed as Markdown as they come and kept as JSON with the conditions of the run
subjects.py    what is measured: published shapes with random weights, engines over them, prompts
cases/         the rows of each case
figures.py     recorded figures: the GPU table of the README and its picture
"""
