"""duoka beside its peers. `python -m benchmarks` measures all in turn and prints one table.

A figure is a ratio of medians that were measured alternately in one run: absolute times depend on the machine
and on its mood, ratios hardly do.

    launch    from the command to the first finished all-reduce, against torchrun
    memory    what the processes of a run hold together
    step      what a step of a plain script costs on one device, against python
    weights   loading 500 MB of safetensors into a model, against torch.load
    checkpoint  saving a model with Adam: what the loop waits for, and the whole, against torch.save
    training  what a step costs on two workers, against DistributedDataParallel by hand

Each is a file with `measure(quick) -> Iterator[Row]` and a line in `BENCHMARKS`.
"""

BENCHMARKS = {
    "launch": "benchmarks.launch",
    "memory": "benchmarks.memory",
    "step": "benchmarks.step",
    "training": "benchmarks.training",
    "weights": "benchmarks.weights",
    "checkpoint": "benchmarks.checkpoint",
}
