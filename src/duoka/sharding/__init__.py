"""Models of which each rank holds a part (`--strategy fsdp`).

`parameter.py`: a sharded parameter, a batch tensor whose torch functions get shards or the unsharded parameter, and
save its position for the backward pass, which unshards again. `block.py`: parameters that are unsharded together, and
which ones of a model are. `blocks.py`: when blocks are unsharded, and gradients are reduce-scattered. `pack.py`: what
is sent. `strategies/fsdp.py` shards the models of a run.

Two hooks lead from the view here: `View.replicate` and the padding of modules ask a parameter for
`duoka_unsharded()`, and `View.prepare_model` shards a model before its first call.
"""
