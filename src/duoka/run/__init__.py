"""The API: duoka.start and the Run that it returns.

starting            find this process's rank, open a run; api_session, calls: its interceptions
run                 Run
models              run.model: precision and scaling (16 bits), sharding and sharded_tensors (fsdp)
backward            checks after each backward pass
schedule            learning rates, clipping
collect             reductions of values that differ between ranks; loss_weights: losses of a rank's own rows
agreement           exchange of Python objects, and checks that ranks agree
progress            progress bars
"""

from duoka.run.run import Run
from duoka.run.schedule import clip_grad_norm_, scale_lr, warmup
from duoka.run.starting import start

__all__ = ["Run", "clip_grad_norm_", "scale_lr", "start", "warmup"]
