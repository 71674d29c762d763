"""The global view: every tensor that a script sees stands for the whole global batch.

modules/        calls of modules: plain inputs, compiled modules, activation checkpointing
dispatch/       one torch function of batch tensors: its rule, or a recorded one repeated
rules/          what each torch function computes on a rank's rows
whole           functions without a rule, which every rank computes on all rows
tensor/         the batch tensor, and the placement of its samples
view            the state that belongs to one rank; `tally`, `recent`, `aliased` and `saved_copies` are parts of it
shares/         the partition of a batch, its strides, several shares in a process, collectives with gradients
generators      those from which a script draws
originals       torch's own versions of functions that duoka replaces
transforms      detects torch.func transforms and dispatch modes
"""

from duoka.view import rules
from duoka.view.dispatch import native

rules.install()
native.install()
