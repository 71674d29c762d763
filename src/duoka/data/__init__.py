"""Loading: each rank reads its own rows of every global batch."""
