from __future__ import annotations

import re

from tests.flows.flow import Flow
from tests.plain.said import run


def test_a_process_group_of_the_script_s_own_is_refused_with_the_way_out(flow: Flow) -> None:
    source = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        """
    result = run(flow, source, "--kind", "plain")
    assert result.returncode == 1
    assert re.search(r"script\.py:3 calls torch\.distributed\.init_process_group", result.stderr)
    assert "run it with --kind distributed" in result.stderr
    assert "script.py" in result.stderr
