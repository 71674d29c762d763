from __future__ import annotations

import os
import threading

from duoka.supervision.ring import Ring, size


def test_entries_of_several_threads_are_whole() -> None:
    memory = memoryview(bytearray(size(8, 64)))
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

    ring = Ring(memoryview(mmap.mmap(-1, size(4, 32))), 4, 32)
    if os.fork() == 0:
        for number in range(6):
            ring.append(str(number).encode() * 40)
        os._exit(0)
    os.wait()
    assert list(ring.since(0)) == [(number + 1, str(number).encode() * 16) for number in range(2, 6)]
    assert list(ring.since(5)) == [(6, b"5" * 16)]
