"""duoka beside its peers. `python -m benchmarks` measures all in turn and prints one table.

A figure is a ratio of medians that were measured alternately in one run: absolute times depend on the machine
and on its mood, ratios hardly do.

    api       the API: a step on two workers, batches from memory
    exact     a step on two workers with --strategy exact, against ddp
    launch    from the command to the first finished all-reduce, against torchrun
    memory    what the processes of a run hold together
    restarts  from the kill of a rank to the first finished all-reduce after it, against torchrun --max-restarts
    step      what a step of a plain script costs on one device, against python
    weights   loading 500 MB of safetensors into a model, against torch.load
    checkpoint  saving a model with Adam: what the loop waits for, and the whole, against torch.save
    training  what a step costs on two workers, against DistributedDataParallel by hand
    watching  what it costs a step that every rank tells where it is
    predict   duoka.predict over two CPU devices, against two processes that do not talk; its peak memory
    gpus      how soon `duoka gpus` answers

`python -m benchmarks.same_result` is about numbers, not time: what duoka and its peers train on 1 to 4 processes.

Each is a file with `measure(quick) -> Iterator[Row]` and a line in `BENCHMARKS`.
"""

BENCHMARKS = {
    "gpus": "benchmarks.gpus",
    "api": "benchmarks.api",
    "exact": "benchmarks.exact",
    "launch": "benchmarks.launch",
    "memory": "benchmarks.memory",
    "predict": "benchmarks.predict",
    "restarts": "benchmarks.restarts",
    "step": "benchmarks.step",
    "training": "benchmarks.training",
    "weights": "benchmarks.weights",
    "checkpoint": "benchmarks.checkpoint",
    "watching": "benchmarks.watching",
}
