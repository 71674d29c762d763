"""Pictures from files that numpy wrote."""
