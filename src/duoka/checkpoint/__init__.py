"""Weights of every format, and checkpoints that survive a crash.

checkpoint.py  `Checkpoint`: saves and restores a training run; signals that ask it to end
states.py      the saved states, by kind, as JSON and tensors
snapshot.py    a checkpoint in memory, and the thread of each rank that writes it
directory.py   the directory of a run: manifests and digests of its checkpoints, which are kept, the lock

saving.py      `save_weights`, to one file or to several and an index; pickled.py: the files of `torch.save`
sharded.py     the bytes that each rank writes of sharded tensors
ranks.py       collectives of the ranks that save together

loading.py     `load_weights`, and a table of the tensors that do not match
names.py       matches the names of tensors in a file and a model
comparing.py   show, compare and convert files
formats/       the file formats of weights, one module each
"""
