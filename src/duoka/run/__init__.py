"""The API: what a script that knows of ranks holds in its hand.

starting   who am I; which interceptions are installed (session, calls)
run        Run
models     run.model
schedule   learning rates, clipping
collect    numbers of ranks that work by themselves; agreement: what ranks tell each other
"""

from duoka.run.run import Run
from duoka.run.schedule import clip_grad_norm_, scale_lr, warmup
from duoka.run.starting import start

__all__ = ["Run", "clip_grad_norm_", "scale_lr", "start", "warmup"]
