"""The batch tensor."""
