"""Backends that are found through entry points, each a package of its own."""
