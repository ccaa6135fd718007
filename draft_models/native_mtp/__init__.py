"""Native MTP: drafters made of the MTP modules in the target's own checkpoint."""
