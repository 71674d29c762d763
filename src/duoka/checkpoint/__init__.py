"""Weights from anywhere, and checkpoints that cannot be lost.

formats/       what files of weights there are, one file per format, and a table of them
stored.py      a tensor in a file: its type and shape are known before its data are read
names.py       which tensors of a file are which of the model
loading.py, saving.py, comparing.py     load_weights, save_weights and convert, diff
manifest.py    what a checkpoint's directory says of itself
values.py      numbers, strings, dicts and tensors as JSON and safetensors
image.py       a safetensors file in memory, before it is written
disk.py        writing so that a crash leaves the old or the new, never half
checkpoint.py  what a training loop holds in its hand
"""
