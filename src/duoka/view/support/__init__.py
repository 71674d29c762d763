"""What the other folders need: torch's original functions, transforms, kinds of modules, caches, batch sizes."""
