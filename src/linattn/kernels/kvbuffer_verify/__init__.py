"""Verification of draft tokens against a state that is only read, or committed to first."""
