from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, said

UNSEEDED = """
    import os, random, secrets, time, uuid
    import numpy as np, torch

    print("torch", torch.rand(2).tolist())
    print("random", random.random(), random.sample(range(99), 3))
    print("numpy", np.random.rand(), np.random.permutation(9).tolist())
    print("default_rng", np.random.default_rng().random(), np.random.default_rng().random())
    print("uuid", uuid.uuid4())
    random.seed(); print("random.seed", random.random())
    np.random.seed(); print("numpy.seed", np.random.rand())
    print("torch.seed", torch.seed(), torch.rand(1).item())
    torch.manual_seed(time.time_ns()); print("clock", torch.rand(1).item())
    random.seed(time.time()); print("clock", random.random())
    np.random.seed(time.time_ns() % 2**32); print("clock", np.random.rand())
    torch.manual_seed(os.getpid()); print("pid", torch.rand(1).item())
    print("Random", random.Random().random(), random.SystemRandom().random())
    print("RandomState", np.random.RandomState().rand(), np.random.RandomState(None).rand())
    generator = torch.Generator(); print("Generator", generator.seed(), torch.rand(1, generator=generator).item())
    generator.manual_seed(int(time.time())); print("initial", torch.initial_seed(), generator.initial_seed())
    print("bytes", os.urandom(4), secrets.token_hex(), secrets.randbelow(10**9), uuid.uuid1())
    print("time", time.time(), time.perf_counter(), time.strftime("%H:%M:%S"), time.monotonic_ns())
    print("set", list({"some", "words", "in", "a", "set"}), hash("text"))
"""


def test_what_nobody_seeded_is_the_same_on_every_rank(flow: Flow) -> None:
    first, other = (text.splitlines() for text in said(flow, UNSEEDED))
    assert [line for line, its in zip(first, other, strict=True) if line != its] == []


def test_runs_that_nobody_seeded_differ(flow: Flow) -> None:
    one, two = (said(flow, UNSEEDED)[0].splitlines() for _ in range(2))
    assert {line.split()[0] for line in one if line in two} == {"set"}  # both were forked from one process


def test_seeds_of_the_script_give_python_s_numbers(flow: Flow) -> None:
    source = """
        import random
        import numpy as np, torch
        torch.manual_seed(3); random.seed(3); np.random.seed(3)
        rng = np.random.default_rng(3)
        print(torch.rand(2).tolist(), random.random(), np.random.rand(), rng.random(), random.Random(3).random())
        random.seed("text"); np.random.seed([1, 2])
        print(torch.random.manual_seed(4) is torch.default_generator, random.random(), np.random.rand())
        """
    as_python(flow, source)


def test_generators_stay_what_they_are(flow: Flow) -> None:
    source = """
        import copy, pickle, random, time
        import numpy as np, torch
        rng, state, generator = np.random.default_rng(1), np.random.RandomState(2), torch.Generator().manual_seed(3)
        again = np.random.default_rng(rng)
        print(again is rng, again.random(), rng.random())
        print(isinstance(state, np.random.RandomState), isinstance(np.random.mtrand._rand, np.random.RandomState))
        print(type(state).__name__, pickle.loads(pickle.dumps(state)).rand(), copy.deepcopy(state).rand())
        print(isinstance(generator, torch.Generator), isinstance(torch.default_generator, torch.Generator))
        print(torch.rand(1, generator=generator).item(), generator.clone_state().initial_seed())
        print(torch.randperm(5, generator=torch.Generator(device="cpu").manual_seed(1)).tolist())

        class Mine(np.random.RandomState):
            pass

        print(Mine(4).rand(), random.Random(5).random(), random.Random("text").random())
        start = time.time()
        print(time.time() - start < 5, time.localtime(0).tm_year >= 1969)
        """
    as_python(flow, source)


def test_decisions_by_the_clock_are_rank_0_s(flow: Flow) -> None:
    source = """
        import time
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < 0.05:
            steps += 1
        print(steps)
        """
    first, other = said(flow, source)
    assert first == other


def test_a_model_that_looks_at_the_clock_is_cut_all_the_same(flow: Flow) -> None:
    source = """
        import os, time, torch

        class Timed(torch.nn.Linear):
            def forward(self, x):
                assert time.time() > 0 and os.path.exists(__file__)
                self.rows = type(x).__name__
                return super().forward(x)

        torch.manual_seed(0)
        model = Timed(3, 2)
        for x in torch.utils.data.DataLoader(torch.randn(8, 3), 4):
            print(round(model(x).sum().item(), 4), model.rows)
        """
    as_python(flow, source)
