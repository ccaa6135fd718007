"""The device's part: prompt chunks and rounds, how they are launched, captured and read back. It knows no request."""
