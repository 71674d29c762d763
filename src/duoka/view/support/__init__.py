"""Helpers: the user's line, torch's settings and original functions, hooks, caches."""
