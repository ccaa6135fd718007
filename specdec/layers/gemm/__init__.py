"""Products: a row of x times every row of a weight, by kernels for few, some and many rows."""
