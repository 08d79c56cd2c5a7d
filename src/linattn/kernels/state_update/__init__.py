"""Commit of accepted draft tokens to the state."""
