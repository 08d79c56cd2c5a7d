"""Decode of one or several tokens a request, with the state in a pool."""
