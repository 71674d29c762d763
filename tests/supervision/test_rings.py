from __future__ import annotations

import math
import os
import threading
import time

from duoka.supervision.rings import NAME, TEXT, VALUES, Ring, ScriptOutput, ring_size
from duoka.supervision.status_board import StatusBoard


def test_entries_of_several_threads_are_whole() -> None:
    memory = memoryview(bytearray(ring_size(8, 64)))
    ring = Ring(memory, 8, 64)
    seen: list[bytes] = []
    done = threading.Event()

    def write(letter: bytes) -> None:
        for length in range(2000):
            ring.append(letter * (length % 48))

    def read() -> None:
        reader, last, is_last = Ring(memory, 8, 64), 0, False
        while not is_last:
            is_last = done.is_set()  # it reads once more then
            new = list(reader.since(last))
            last = new[-1][0] if new else last
            seen.extend(content for _, content in new)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    reading = threading.Thread(target=read)
    for thread in (reading, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reading.join()
    assert sum(len(set(content)) == 1 for content in seen) > 0
    assert ring.last >= 4000 - 1
    assert all(len(set(content)) <= 1 for content in seen)


def test_what_a_forked_process_appends_is_read_here() -> None:
    import mmap

    ring = Ring(memoryview(mmap.mmap(-1, ring_size(4, 32))), 4, 32)
    if os.fork() == 0:
        for number in range(6):
            ring.append(str(number).encode() * 40)
        os._exit(0)
    os.wait()
    assert list(ring.since(0)) == [(number + 1, str(number).encode() * 16) for number in range(2, 6)]
    assert list(ring.since(5)) == [(6, b"5" * 16)]


def output() -> ScriptOutput:
    return StatusBoard.create(2).script_output


def values(output: ScriptOutput, after: int = 0) -> list[tuple[int, str, int | None, float]]:
    return [(number, value.name, value.step, value.value) for number, value in output.logged(after)]


def test_values_are_read_in_order_with_their_times() -> None:
    found = output()
    assert values(found) == []
    begun = time.monotonic()
    found.log(3, {"loss": 0.5, "name": "text", "épochs": 2})
    found.log(None, {"loss": math.inf})
    assert values(found) == [(1, "loss", 3, 0.5), (2, "épochs", 3, 2.0), (3, "loss", None, math.inf)]
    assert values(found, 2) == [(3, "loss", None, math.inf)]
    assert all(begun <= value.time <= time.monotonic() for _, value in found.logged(0))


def test_the_oldest_are_forgotten() -> None:
    found = output()
    for step in range(VALUES + 10):
        found.log(step, {"x": step})
    assert [step for _, _, step, _ in values(found)] == list(range(10, VALUES + 10))


def test_what_is_long_is_cut() -> None:
    found = output()
    found.log(0, {"x" * 200: 1.0})
    found.print("y" * 2000, redrawn=False)
    found.show_loops({"long": "z" * 2000})
    assert values(found) == [(1, "x" * NAME, 0, 1.0)]
    assert [line.text for _, line in found.printed(0)] == ["y" * TEXT]
    assert found.loops() == {}


def test_the_newest_place_counts() -> None:
    found = output()
    assert found.loops() == {}
    found.show_loops({"epoch": 1})
    found.show_loops({"epoch": 2})
    assert found.loops() == {"epoch": 2}
