"""The global view: every tensor that a script sees stands for the whole global batch.

cut          who has which rows
collectives  operations between ranks, with their gradients
batch        the batch tensor, which looks every operation up in
rules        what an operation does to rows
boundary     the outermost module call, where rows become plain tensors
seams        how calls are cut; learning finds it out
nearby       small CPU tensors, through memory that ranks share
draws, norm  what inside a boundary concerns the whole batch: random numbers, BatchNorm
"""

from duoka.view.rules import install

install()
