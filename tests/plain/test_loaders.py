from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, run, said

SOURCE = """
    import queue, torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        read = queue.SimpleQueue()  # which nobody looks into, as into a counter

        def __len__(self):
            return 20

        def __getitem__(self, index):
            self.read.put(index)
            return torch.arange(3.0) + index, index

    torch.manual_seed(0)
    loader = DataLoader(Samples(), 5, shuffle=True)
    for _ in range(2):
        for x, y in loader:
            print(len(x), y.tolist(), x.mean().item())
    print(torch.rand(1).item())
"""


def test_batches_are_python_s(flow: Flow) -> None:
    as_python(flow, SOURCE)


def test_each_rank_reads_its_own_rows_or_all(flow: Flow) -> None:
    def read(*options: str) -> list[int]:
        return [int(text.split()[-1]) for text in said(flow, SOURCE + "    print(Samples.read.qsize())\n", *options)]

    assert read() == [5 + 7 * 2, 5 + 7 * 3]
    assert read("--loading", "whole") == [40, 40]


def test_a_worker_init_function_of_the_script_s_own(flow: Flow) -> None:
    source = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset, get_worker_info

        def init(worker):
            get_worker_info().dataset.tensors = (torch.arange(8.0) * 10,)

        if __name__ == "__main__":
            torch.manual_seed(0)
            for (x,) in DataLoader(TensorDataset(torch.arange(8.0)), 4, num_workers=1, worker_init_fn=init):
                print(x.tolist())
        """
    as_python(flow, source)


def test_datasets_that_remember_are_read_whole(flow: Flow) -> None:
    """Generators and counters of their own, in attributes, transforms, closures and variables outside."""
    source = """
        import random, torch
        import numpy as np
        from torch.utils.data import DataLoader, Dataset, Subset

        outside, count = np.random.default_rng(1), 0

        class Noise:
            def __init__(self):
                self.rng = random.Random(5)

            def __call__(self, x):
                return x + self.rng.random()

        class Samples(Dataset):
            def __init__(self, kind):
                self.kind, self.read, self.transform = kind, 0, Noise()
                rng = torch.Generator().manual_seed(4) if kind == "torch" else np.random.RandomState(3)
                self.rngs = {kind: rng}

            def __len__(self):
                return 16

            @torch.no_grad()
            def __getitem__(self, index):
                global count
                x = torch.arange(3.0) + index
                if self.kind == "counter":
                    self.read += 1
                    return x + self.read
                if self.kind == "transform":
                    return self.transform(x)
                if self.kind == "numpy":
                    return x + self.rngs["numpy"].rand()
                if self.kind == "torch":
                    return x + torch.rand(3, generator=self.rngs["torch"])
                if self.kind == "count":
                    count += 1
                    return x + count
                return x + outside.random()

        if __name__ == "__main__":
            torch.manual_seed(0)
            for kind in ("counter", "transform", "numpy", "torch", "count", "outside"):
                for workers in (0, 1) if kind == "numpy" else (0,):
                    for x in DataLoader(Subset(Samples(kind), range(15)), 4, shuffle=True, num_workers=workers):
                        print(kind, x.tolist())
            print(count, outside.random())
        """
    as_python(flow, source)


def test_what_reading_does_to_the_world_is_each_rank_s_own(flow: Flow) -> None:
    """Seeds by index, caches in files, questions and models: only some ranks read a sample."""
    source = """
        import os, random, shutil, time, torch
        import numpy as np
        from torch.utils.data import DataLoader, Dataset

        shutil.rmtree("cache", ignore_errors=True)
        os.mkdir("cache")
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 3)

        class Samples(Dataset):
            handle = None

            def __len__(self):
                return 17

            def __getitem__(self, index):
                if self.handle is None:
                    self.handle = open(__file__)
                states = torch.get_rng_state(), random.getstate(), np.random.get_state()
                torch.manual_seed(index), random.seed(index), np.random.seed(index)
                x = torch.rand(3) + random.random() + np.random.rand() + np.random.default_rng(index).random()
                torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])
                path = f"cache/{index}.pt"
                if not os.path.exists(path):
                    torch.save(x, path)
                    with open(path + ".txt", "w") as file:
                        file.write(str(time.time()))
                assert os.path.isfile(path + ".txt")
                with torch.no_grad():
                    return torch.load(path) + model(x[None].expand(4, 3))[0]

        torch.manual_seed(0)
        for _ in range(2):
            for x in DataLoader(Samples(), 4, shuffle=True):
                print(x.shape, [round(v, 4) for v in x.sum(1).tolist()])
        print(len(os.listdir("cache")), random.Random(3).random())
        """
    as_python(flow, source)


def test_workers_read_a_dataset_that_holds_batches(flow: Flow) -> None:
    """As features of a frozen model, from which another one learns."""
    source = """
        import torch
        from torch.utils.data import DataLoader, Dataset, TensorDataset

        class Pairs(Dataset):
            def __init__(self, of):
                self.of = of

            def __len__(self):
                return len(self.of)

            def __getitem__(self, index):
                return self.of[index], self.of[index - 1].mean(), self.of.sum()

        features = next(iter(DataLoader(torch.arange(44.0).view(11, 4) % 7, 11))) * 2
        for dataset in (TensorDataset(features, torch.arange(11)), Pairs(features), Pairs(features[:, 1:])):
            for loader in (
                DataLoader(dataset, 4, num_workers=1),
                DataLoader(dataset, 4, num_workers=2, persistent_workers=True, collate_fn=lambda some: some[0]),
            ):
                for _ in range(2):
                    for batch in loader:
                        print([part.tolist() for part in batch])
                    features += 1
        """
    as_python(flow, source)


def test_samples_that_are_batches_themselves_or_parts_of_them(flow: Flow) -> None:
    source = """
        import torch
        from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

        class Samples(Dataset):
            def __init__(self, values):
                self.values = values

            def __len__(self):
                return 12

            def __getitem__(self, index):
                return self.values[index] if torch.is_tensor(self.values) else self.values[index % 3][0][index // 3]

        memory = list(DataLoader(TensorDataset(torch.arange(26.0).view(13, 2), torch.arange(13)), 4))
        for _ in range(2):
            for x, y in DataLoader(memory[:3], 2):
                print(x.sum().item(), x[0].mean(1).tolist(), y.tolist())
        for sample in DataLoader([{"x": x[:, 0], "first": x[0, 0].item()} for x, y in memory[:2]], 2):
            print(sample["x"].sum(0).tolist(), sample["first"].tolist())
        for x, y in DataLoader(ConcatDataset([TensorDataset(*batch) for batch in memory]), 5):
            print(x.sum(1).tolist(), y.tolist())
        samples = Samples(torch.ones(12, 2))
        loader = DataLoader(samples, 3)
        for values in (samples.values, memory, next(iter(DataLoader(torch.arange(24.0).view(12, 2), 12))) * 2):
            samples.values = values
            print([x.sum(1).tolist() for x in loader])
        """
    as_python(flow, source)


def test_a_model_of_sharded_parameters_in_a_dataset(flow: Flow) -> None:
    """Each rank would gather those that its rows need."""
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Dataset

        class Features(Dataset):
            def __len__(self):
                return 8

            @torch.no_grad()
            def __getitem__(self, index):
                return encoders[index % 2](torch.full((4,), index / 8))

        torch.manual_seed(0)
        encoders = nn.ModuleList(nn.Linear(4, 6) for _ in range(2))
        optimizer = torch.optim.SGD(encoders.parameters(), 0.1)
        for x in DataLoader(Features(), 2):
            loss = (encoders[0](x[:, 2:]) - encoders[1](x[:, :4])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{x.sum().item():.4f} {loss.item():.4f}")
        """
    as_python(flow, source, "--strategy", "fsdp")


def test_a_dataset_to_which_batches_are_added_while_it_is_read(flow: Flow) -> None:
    source = """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Memory(Dataset):
            kept = None

            def __len__(self):
                return 8

            def __getitem__(self, index):
                return torch.tensor(float(index)) if self.kept is None or index == 4 else self.kept[index % 2]

        memory = Memory()
        for x in DataLoader(memory, 2):
            memory.kept = x * 2
            print(x.sum().item())
        """
    as_python(flow, source, "--loading", "whole")
    result = run(flow, source)
    assert result.returncode == 1
    assert "while this rank reads its own rows, without the other ranks; use --loading whole" in result.stderr


def test_a_process_that_the_script_forks_takes_part_in_no_collective(flow: Flow) -> None:
    source = """
        import multiprocessing, sys, torch
        from torch.utils.data import DataLoader

        def work(x):
            sys.stderr = open("error.txt", "w")
            print(x.sum())

        for x in DataLoader(torch.arange(8.0), 4):
            process = multiprocessing.get_context("fork").Process(target=work, args=(x,))
            process.start()
            process.join()
            print(process.exitcode, x.sum().item(), x.max().item())
        print(open("error.txt").read().splitlines()[-1])
        """
    *lines, error = said(flow, source)[0].splitlines()
    assert lines == ["1 6.0 3.0", "1 22.0 7.0"]
    assert "computes with a batch or a sharded parameter in a process that the script started" in error
