"""Choosing the fastest candidate: verification, timing, and the store of results."""
