"""Weights from anywhere, and checkpoints that cannot be lost.

checkpoint.py  what a training loop holds in its hand
preemption.py  being asked to end
writing.py     a checkpoint in memory, and the thread that writes it
reading.py     its files, each read once, while their digests are computed
states.py      what is kept, by kind
values.py      numbers, strings, dicts and tensors as JSON and safetensors
manifest.py    what a checkpoint's directory says of itself
ranks.py       how several ranks agree
lock.py        one run alone writes into a directory

loading.py, saving.py, comparing.py    load_weights; save_weights; show, diff and convert
shards.py      weights in several files and an index
names.py       which tensors of a file are which of the model; mismatch.py: what does not fit, as a table
formats/       what files of weights there are, one file per format, and a table of them
contents.py    what is in a file; stored.py: a tensor of it, known before its data are read
image.py       tensors as the bytes of a safetensors file
disk.py        writing so that a crash leaves the old or the new, never half
"""
