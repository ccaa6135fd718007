"""A private copy of a module tree: how it is made, and how changes of the original are detected."""
