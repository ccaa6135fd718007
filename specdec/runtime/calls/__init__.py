"""Calls of users: their arguments become requests, which an inbox keeps until a turn; handles give the tokens back."""
