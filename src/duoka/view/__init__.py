"""The global view: every tensor that a script sees stands for the whole global batch.

What a batch is:        cut (who has which rows), batch (the batch tensor), shares (several of a batch in a process)
What is computed on it: rules (what an operation does to rows), tally (what all ranks compute whole), lent
Module calls:           boundary (where rows become plain tensors), call (one, taken apart), seams (how kinds of calls
                        are cut), learning, witness, traceless (finding that out), contents, parts, standin
What concerns all rows: draws (random numbers), norm (BatchNorm), crossings (gradients), tree (sums in one order)
One call per share:     repeating, aliases
Between ranks:          collectives, alone (of one rank), nearby (through shared memory), far (between machines)
What they all use:      view (what belongs to one rank), site (the user's line), determinism (torch's settings)
"""

from duoka.view.rules import install

install()
