"""The device side: prompt chunks and rounds, and how they are launched, captured and read back. It knows no request."""
