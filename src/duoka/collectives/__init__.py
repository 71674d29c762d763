"""Collectives between ranks: over process groups, shared memory, or connections straight from rank to rank."""
