"""Who has which rows, several shares in one process, and what all rows have to do with: gradients, BatchNorm."""
