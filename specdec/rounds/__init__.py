"""The device's part: prompt chunks and speculative rounds, how they are launched, captured and read."""
