"""The device side: prompt chunks and rounds, their captures and their results. It knows no request."""
