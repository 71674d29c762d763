"""Weights of every format, and checkpoints that survive a crash.

checkpoint.py  `Checkpoint`: saves and restores a training run
preemption.py  signals that ask a run to end
writing.py     a checkpoint in memory, and the thread that writes it
reading.py     the files of a checkpoint, read once while their digests are computed
states.py      the saved states, by kind
values.py      numbers, strings, dicts and tensors as JSON and safetensors
manifest.py    `manifest.json`, the table of contents of a checkpoint
parts.py       tensors of several ranks in several files: who gathers which, and the end of a save
drafts.py      files into which each rank writes its own rows; pickled.py: those of `torch.save`
ranks.py       collectives of the ranks that save together
lock.py        a file lock: one run writes into a directory

loading.py, saving.py, comparing.py    load_weights; save_weights; show, compare and convert files
shards.py      weights in several files and an index
names.py       matches the tensors of a file and a model; mismatch.py: a table of those that do not match
formats/       the file formats of weights, one module each
contents.py    the contents of a file; stored.py: a tensor in it, whose data are read on demand
image.py       tensors as the bytes of a safetensors file
disk.py        crash-safe writes: atomic rename and fsync
"""
