"""Block drafters (DFlash, DSpark, JetSpec): one loader, one head and its fused form, one drafter."""
