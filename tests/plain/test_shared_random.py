from __future__ import annotations

from torch.distributed import HashStore  # type: ignore[attr-defined]

from duoka.plain.shared_random import SharedRandom
from tests.flows.flow import Flow
from tests.plain.said import said

# What a library does: its code's file is where packages are installed.
LIBRARY = """
import multiprocessing, os, random, secrets, subprocess, sys, sysconfig, tempfile, threading, time, uuid
import datetime as dates
import numpy as np, torch
from torch.utils.data import DataLoader, IterableDataset

def of_library(source):
    space = {}
    exec(compile(source, sysconfig.get_paths()["purelib"] + "/a_library/code.py", "exec"), space)
    return space
"""


def test_what_a_library_draws_is_the_same_on_every_rank(flow: Flow) -> None:
    source = f"""{LIBRARY}
library = of_library('''
import datetime, os, random, secrets, time, uuid, threading
import numpy as np, torch
def draws():
    yield os.urandom(4), secrets.token_hex(), uuid.uuid4(), uuid.uuid1(), random.SystemRandom().random()
    yield random.Random().random(), np.random.default_rng().random(), np.random.RandomState().rand()
    yield np.random.SeedSequence().entropy, torch.Generator().seed(), datetime.datetime.now()
    yield random.Random(int((os.getpid() + time.time()) * 1e9)).random(), time.strftime("%H:%M:%S")
    yield np.random.default_rng(time.time_ns()).random(), np.random.RandomState(os.getpid()).rand()
    found = []
    thread = threading.Thread(target=lambda: found.append(uuid.uuid4()))
    thread.start()
    thread.join()
    yield found
''')
for drawn in library["draws"]():
    print(drawn)
for drawn in library["draws"]():
    print(drawn)
"""
    first, other = (text.splitlines() for text in said(flow, source))
    assert first == other
    assert len(set(first)) == len(first)  # the same from one place again is another number


def test_who_asks_more_often_does_not_shift_the_others(flow: Flow) -> None:
    source = f"""{LIBRARY}
for _ in range(os.getpid() % 5):
    os.urandom(1), uuid.uuid4(), random.Random(1), random.seed(os.getpid())
print(os.urandom(4), uuid.uuid4(), random.Random(os.getpid()).random())
"""
    first, other = said(flow, source)
    assert first == other


def test_what_must_be_a_process_s_own_stays_so(flow: Flow) -> None:
    source = f"""{LIBRARY}
library = of_library('''
import tempfile
from multiprocessing import connection, shared_memory
def names():
    memory = shared_memory.SharedMemory(create=True, size=1)
    memory.close()
    memory.unlink()
    with tempfile.NamedTemporaryFile() as file:
        return memory.name, connection.arbitrary_address("AF_UNIX"), file.name
''')
print(*library["names"](), sep=chr(10))
"""
    first, other = (text.splitlines() for text in said(flow, source))
    assert len(first) == 3
    assert not set(first) & set(other)


def test_processes_that_are_forked_and_a_loader_s_workers_draw_alike(flow: Flow) -> None:
    source = f"""{LIBRARY}
def draw(pipe):
    pipe.send((os.urandom(4), random.random(), random.Random(time.time()).random(), np.random.default_rng().random()))

class Drawn(IterableDataset):
    def __iter__(self):
        rng = random.Random(int((os.getpid() + time.time()) * 1e9))
        for _ in range(4):
            yield rng.random(), np.random.default_rng().random()

def main():
    for _ in range(2):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=draw, args=(there,))
        process.start()
        print(here.recv())
        process.join()
    for how, count in (("fork", 2), ("forkserver", 1)):
        for batch in DataLoader(Drawn(), 4, num_workers=count, multiprocessing_context=how):
            print(batch[0].tolist(), batch[1].tolist())
    hashes = subprocess.run([sys.executable, "-c", "print(hash('text'))"], capture_output=True, text=True)
    print(os.environ["PYTHONHASHSEED"], hashes.stdout)

if __name__ == "__main__":
    main()
"""
    first, other = (text.splitlines() for text in said(flow, source))
    assert first == other
    assert len(set(first)) == len(first)


def test_rows_that_only_one_rank_reads_are_drawn_by_it(flow: Flow) -> None:
    source = f"""{LIBRARY}
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return np.random.default_rng().random()

for batch in DataLoader(Noisy(), 8):
    values = batch.tolist()
print(len(set(values)))
"""
    assert said(flow, source) == ["8\n", "8\n"]


def test_the_rank_that_comes_first_chooses() -> None:
    store = HashStore()
    ranks = [SharedRandom(7, lambda: store) for _ in range(2)]
    for first, second in (("a", "b"), ([1.5], None)):
        assert [rank.agree(value) for rank, value in zip(ranks, (first, second), strict=True)] == [first] * 2
    assert SharedRandom(7).agree("alone") == "alone"


def test_runs_draw_differently_and_by_itself_one_draws_from_the_system() -> None:
    ranks = SharedRandom(7), SharedRandom(7), SharedRandom(8)
    (one, other, another), later = ([rank.draw(8) for rank in ranks] for _ in range(2))
    assert one == other != another
    assert one != later[0]
    alone = SharedRandom(7)
    alone.rank_local = lambda: True
    assert alone.draw(8) is None
