"""Seconds and rates in words."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Format seconds: `0:07`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_words(seconds: float) -> str:
    """Format seconds: `1.2 s`, `12.3 ms`, `103 µs`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def per_second(rate: float) -> str:
    """Format a rate with four digits: `0.512`, `13,250`."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"
