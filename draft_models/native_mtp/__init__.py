"""Native MTP: drafters whose modules lie in the target's own checkpoint."""
