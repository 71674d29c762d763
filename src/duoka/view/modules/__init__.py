"""Calls of modules with batches."""
