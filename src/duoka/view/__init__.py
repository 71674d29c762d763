"""The global view: every tensor that a script sees stands for the whole global batch.

view            the state that belongs to one rank; `tally`, `recent` and `aliased` are parts of it
tensor/         the batch tensor, and the placement of its samples
dispatch/       one torch function of batch tensors: its rule, recorded rules, computed whole
rules/          what each torch function computes on a rank's rows
modules/        calls of modules: plain inputs, compiled modules, activation checkpointing
shares/         the partition of a batch, several shares in a process, collectives with gradients
random          the generators, and draws for rows
originals       torch's own versions of functions that duoka replaces
transforms      detects torch.func transforms and dispatch modes
"""

from duoka.view.rules import install

install()
