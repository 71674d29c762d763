"""What all of the view uses: the user's line, torch's settings and originals, hooks, small tables."""
