"""The rows of each case. A part NAME of a case is the function `NAME_rows` of its module."""
