"""The parts of torch and Python that duoka needs and that they document nowhere. No other file names one.

python.py   of Python and multiprocessing
torch.py    of torch
texts.py    what torch, gloo and CUDA say, where duoka tells errors apart by it; needs neither
lookup.py   what is raised where this torch or Python lacks one

What is missing in a new version is found here, when the file is imported, and nowhere else.
"""
