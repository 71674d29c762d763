"""Draws nothing."""


def use(backend: str) -> None:
    pass
