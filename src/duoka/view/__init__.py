"""The global view: every tensor that a script sees stands for the whole global batch.

What a batch is:        cut (who has which rows), batch (the batch tensor), shares (several of a batch in a process)
What is computed on it: dispatch (one function of it), rules (what that does to rows), replay (what it did before),
                        whole (what has no rule), tally (how much that is), layout, lent
Module calls:           calls (plain inputs, parameters), compiled, recomputing (checkpoints), contents, parts,
                        standin
What concerns all rows: draws (random numbers), norm (BatchNorm), crossings (gradients), tree (sums in one order),
                        graph
Between ranks:          collectives, alone (of one rank), nearby (through shared memory), far and direct (between
                        machines)
What they all use:      view (what belongs to one rank), site (the user's line), determinism (torch's settings),
                        handles (numbers of hooks)
"""

from duoka.view.rules import install

install()
