"""What is left of it."""

import urllib.request

__all__ = ["urllib"]
