"""From what was asked for to what is done.

options.py      requested settings, checked
plan.py         decided settings: from options, hardware/ and script/
describing.py   a plan in words
picking.py      `duoka.devices`: devices for a program that places tensors itself
"""
