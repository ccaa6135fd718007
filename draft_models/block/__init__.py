"""Block drafters (DFlash, DSpark, JetSpec): a loader, a head with its fused form, and the drafter."""
