"""Look for programs that ranks run otherwise than one device: python -m tests.fuzz views --programs 500 --seed 3."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.fuzz.search import FAMILIES, Search


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--programs", type=int, default=500, help="of each family")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--strategies", default="", help="ddp, exact, fsdp, offload; those of the family")
    parser.add_argument("--most", type=int, default=10, help="faults to make small and show, of each family")
    parser.add_argument("--refused", action="store_true", help="show programs that are refused, too")
    parser.add_argument("--without", default="", help="leave statements out that contain this (a regular expression)")
    parser.add_argument("--rows", action="store_true", help="uneven shares of a batch")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    faults = 0
    for family in chosen.families or FAMILIES:
        strategies = chosen.strategies.split(",") if chosen.strategies else None
        search = Search(family, [int(count) for count in chosen.ranks.split(",")], strategies, rows=chosen.rows)
        begun = time.monotonic()
        with search:
            search.run(chosen.programs, chosen.seed, chosen.seconds, chosen.most, chosen.refused, chosen.without)
        print(f"{search.report()}; {time.monotonic() - begun:.0f} s", flush=True)
        faults += len(search.faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
