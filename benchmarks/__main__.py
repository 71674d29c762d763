"""`python -m benchmarks [names]`. Exit code 1 if a bar is missed."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module

import benchmarks
from benchmarks import machine, readme, results, table
from benchmarks.results import Measured


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__, epilog=_listed())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="name", help="which to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results, and renew the tables")
    parser.add_argument("--readme", action="store_true", help="measure nothing; renew the tables in the README")
    args = parser.parse_args()
    if unknown := set(args.names) - set(benchmarks.BENCHMARKS):
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(benchmarks.BENCHMARKS)}")
    if args.quick and args.write:
        parser.error("--quick is a look: what is kept is measured in full, so without --write")
    if args.readme:
        readme.write()
        return 0

    measured = {name: _measured(name, args.quick) for name in args.names or benchmarks.BENCHMARKS}
    found = [it for one in measured.values() for it in one.found]
    print(machine.this())
    table.show(found)
    if args.write:
        print(f"written: {results.write(measured)}", file=sys.stderr)
        readme.write()
    return 0 if all(it.holds for it in found) else 1


def _measured(name: str, quick: bool) -> Measured:
    begin = time.perf_counter()
    print(f"measuring: {name}", end="", file=sys.stderr, flush=True)
    found = list(import_module(benchmarks.BENCHMARKS[name]).measure(quick))
    seconds = time.perf_counter() - begin
    print(f", {seconds:.0f} s" if found else ": needs a GPU, not measured here", file=sys.stderr)
    return Measured.now(seconds, found)


def _listed() -> str:
    """A line for each benchmark, out of its file's first line."""
    texts = {name: import_module(home).__doc__ or "" for name, home in benchmarks.BENCHMARKS.items()}
    return "\n".join(f"{name:12}{text.splitlines()[0]}" for name, text in texts.items())


if __name__ == "__main__":
    sys.exit(main())
