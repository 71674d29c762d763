"""What is left of it."""
