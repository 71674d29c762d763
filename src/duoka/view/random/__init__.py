"""Random numbers for the rows of a batch: drawn for the whole batch, and this rank's rows kept."""
