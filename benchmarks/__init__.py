"""duoka beside its peers. `python -m benchmarks` measures all in turn and prints one table.

A figure is a ratio of medians that were measured alternately in one run: absolute times depend on the machine
and on its mood, ratios hardly do. What needs a GPU is measured where there is one, and else stays "not measured".

Each benchmark is a file with `measure(quick) -> Iterator[Row | Finding]` and a line in `BENCHMARKS`; what the README
shows of it is an entry in `figures.toml`.
"""

BENCHMARKS = {
    "launch": "benchmarks.launch",
    "memory": "benchmarks.memory",
    "step": "benchmarks.step",
    "host": "benchmarks.host",
    "far": "benchmarks.far",
    "training": "benchmarks.training",
    "loading": "benchmarks.loading",
    "exact": "benchmarks.exact",
    "rows": "benchmarks.rows",
    "sharded": "benchmarks.sharded",
    "end_to_end": "benchmarks.end_to_end",
    "same_result": "benchmarks.same_result",
    "weights": "benchmarks.weights",
    "checkpoint": "benchmarks.checkpoint",
    "restarts": "benchmarks.restarts",
    "predict": "benchmarks.predict",
    "watching": "benchmarks.watching",
    "gpus": "benchmarks.gpus",
    "cuda": "benchmarks.cuda",
}
