"""The partition of a batch into shares, several shares in one process, differentiable collectives, BatchNorm."""
