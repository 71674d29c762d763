"""One torch function of batch tensors: by its rule, by what the rule did before, or of all rows."""
