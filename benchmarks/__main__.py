"""`python -m benchmarks [names] [--quick]`. Exit code 1 if a bar is missed."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

import benchmarks
from benchmarks import table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="name", help="which to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    args = parser.parse_args()
    if unknown := set(args.names) - set(benchmarks.BENCHMARKS):
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(benchmarks.BENCHMARKS)}")

    rows = []
    for name in args.names or benchmarks.BENCHMARKS:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        rows += import_module(benchmarks.BENCHMARKS[name]).measure(args.quick)
    table.show(rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
