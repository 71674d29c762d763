"""Gives a new Python process its simulated cards, where SIMULATED_CARDS is set."""

import os

if os.environ.get("SIMULATED_CARDS"):
    import importlib.util
    import sys

    file = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cards.py")
    spec = importlib.util.spec_from_file_location("simulated_cards_in_python", file)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
