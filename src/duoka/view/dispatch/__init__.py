"""Call one torch function with batch tensors: by its rule, by recorded calls of the rule, or with all rows."""
