"""As much of torchtext's old interface as one program needs."""
