"""Private and undocumented parts of torch and Python that duoka needs. No other file names one.

python.py   of Python and multiprocessing
torch.py    of torch
light.py    of torch, without importing more than `import torch` does
texts.py    error messages of torch, gloo and GPUs by which duoka distinguishes errors; imports neither
lookup.py   the error about a part that this version of torch or Python lacks

A part that is missing in a new version is noticed when these files are imported.
"""
