"""`duoka.ray.launch`: a function or a script on the nodes of a Ray cluster, as one run.

launching   on the driver: find nodes for the commands (a placement group), start `duoka run` on each, and collect how
            they ended
call        in a worker: call the function

Ray is an optional dependency: it is imported when `launch` is called.
"""

from __future__ import annotations

from duoka.ray.launching import launch

__all__ = ["launch"]
