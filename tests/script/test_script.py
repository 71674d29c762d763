"""Scripts as people write them, and the kind that each is."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from duoka.script import Kind, Script, Target, read

PLAIN = {
    "no sign": """
        import torch
        model = torch.nn.Linear(2, 2)
    """,
    "asks only whether a group is there": """
        import torch.distributed as dist
        def is_main():
            return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        print(is_main())
    """,
    "imports libraries without handing over": """
        from accelerate.utils import set_seed
        from transformers import AutoModel
        import ignite.metrics, lightning
        set_seed(0)
        print(lightning.__version__)
    """,
    "other variables": """
        import os
        print(os.environ["HOME"], os.getenv("USER"), "PATH" in os.environ, os.environ.get("rank"))
    """,
    "RANK in something else": """
        settings = {"RANK": 1}
        print(settings["RANK"], settings.get("WORLD_SIZE"), "RANK" in settings)
    """,
    "words in texts": """
        '''Reads os.environ["RANK"] and calls init_process_group: not true.'''
        # import torch.distributed as dist; dist.init_process_group()
        print("init_process_group")
    """,
    "processes that are not ranks": """
        import torch.multiprocessing as mp
        mp.spawn(print, nprocs=2)
    """,
    "a trainer of its own": """
        class Trainer: pass
        class Accelerator: pass
        Trainer(), Accelerator()
    """,
    "does not parse": "x = = 1",
    "is empty": "",
}


@pytest.fixture
def tell(tmp_path: Path) -> object:
    def tell(source: str, **others: str) -> Script:
        for name, text in {"train": source, **others}.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text).lstrip())
        return read(Target(str(tmp_path / "train.py")))

    return tell


@pytest.mark.parametrize("source", PLAIN.values(), ids=PLAIN)
def test_plain(tell, source: str) -> None:
    script = tell(source)
    assert (script.kind, script.reason, script.can_be_either) == (Kind.PLAIN, "", False)
    assert not script.self_launching


DISTRIBUTED = {
    "train.py:2 calls init_process_group": """
        import torch.distributed as dist
        dist.init_process_group("gloo")
    """,
    "train.py:3 calls init_process_group": """
        from torch.distributed import init_process_group as start
        def main():
            start(backend="nccl")
        if __name__ == "__main__":
            main()
    """,
    "train.py:2 calls init_process_group ": """
        from torch.distributed import *
        init_process_group("gloo")
    """,
    "train.py:4 calls init_process_group": """
        import torch.distributed as dist, torch
        if torch.cuda.is_available() and dist.is_nccl_available():
            if not dist.is_initialized():
                dist.init_process_group("nccl")
    """,
    "train.py:5 calls init_process_group": """
        import torch
        class Trainer:
            def __init__(self):
                try:
                    torch.distributed.init_process_group("nccl")
                except RuntimeError:
                    raise SystemExit("use torchrun")
        Trainer()
    """,
    "train.py:5 calls init_process_group ": """
        import sys
        from torch import distributed as dist
        def main():
            if sys.platform == "win32":
                dist.init_process_group("gloo", init_method="file:///x")
            elif sys.argv[1:]:
                dist.init_process_group("gloo")
            else:
                dist.init_process_group("nccl")
        main()
    """,
    "train.py:3 calls init_process_group ": """
        import sys, torch
        def start(backend):
            torch.distributed.init_process_group(backend)
        if torch.cuda.device_count() > 1:
            start("nccl")
        else:
            start("gloo")
    """,
    "train.py:2 reads RANK  ": """
        import os
        settings = {name: os.environ[name] for name in ("MASTER_ADDR", "RANK")}
    """,
    "train.py:2 calls init_device_mesh": """
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2,))
    """,
    "train.py:2 reads RANK": """
        import os
        rank = int(os.environ["RANK"])
    """,
    "train.py:3 reads LOCAL_RANK": """
        from os import environ as env
        settings = env
        rank = int(settings["LOCAL_RANK"])
    """,
    "train.py:2 reads WORLD_SIZE": """
        from os import getenv
        size = int(getenv("WORLD_SIZE"))
    """,
    "train.py:2 reads LOCAL_RANK": """
        import os
        assert "LOCAL_RANK" in os.environ, "use torchrun"
    """,
    "train.py:2 reads RANK ": """
        import os, sys
        if "RANK" not in os.environ:
            sys.exit("use torchrun")
    """,
    "train.py:2 uses deepspeed's initialize": """
        import deepspeed
        engine, *_ = deepspeed.initialize(model=None)
    """,
    "train.py:2 uses horovod's init": """
        import horovod.torch as hvd
        hvd.init()
    """,
}


@pytest.mark.parametrize(("reason", "source"), DISTRIBUTED.items(), ids=DISTRIBUTED)
def test_distributed(tell, reason: str, source: str) -> None:
    script = tell(source)
    assert (script.kind, script.reason) == (Kind.DISTRIBUTED, reason.strip())
    assert not script.can_be_either
    assert not script.self_launching


EITHER = {
    "train.py:2 uses accelerate's Accelerator": """
        from accelerate import Accelerator
        accelerator = Accelerator()
    """,
    "train.py:2 uses lightning's Trainer": """
        import lightning as L
        trainer = L.Trainer(max_epochs=3)
    """,
    "train.py:3 uses lightning's Fabric": """
        from lightning.fabric import Fabric
        def main():
            fabric = Fabric()
        main()
    """,
    "train.py:2 uses transformers's Trainer": """
        import transformers
        class Mine(transformers.Trainer):
            pass
    """,
    "train.py:2 uses ignite's Parallel": """
        import ignite.distributed as idist
        with idist.Parallel(backend="gloo") as parallel: pass
    """,
    "train.py:2 reads RANK if it is set": """
        import os, torch
        if int(os.environ.get("RANK", -1)) != -1:
            torch.distributed.init_process_group("nccl")
            rank = int(os.environ["RANK"])
    """,
    "train.py:3 reads RANK if it is set": """
        import os, torch
        def init(args):
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                args.rank = int(os.environ["RANK"])
            else:
                args.distributed = False
                return
            torch.distributed.init_process_group("nccl")
        init(object())
    """,
    "train.py:2 reads WORLD_SIZE if it is set": """
        import os, torch.distributed as dist
        size = int(os.getenv("WORLD_SIZE", "1"))
        def start():
            dist.init_process_group()
        if size > 1:
            start()
    """,
    "train.py:3 reads LOCAL_RANK if it is set": """
        import os
        try:
            rank = int(os.environ["LOCAL_RANK"])
        except KeyError:
            rank = 0
    """,
    "train.py:2 reads WORLD_SIZE if it is set ": """
        import os
        size = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else 1
    """,
    "train.py:2 reads RANK if it is set ": """
        import os
        launched = "RANK" in os.environ and int(os.environ["RANK"]) >= 0
    """,
    "train.py:2 reads WORLD_SIZE if it is set  ": """
        import os, torch
        if all(name in os.environ for name in ["RANK", "WORLD_SIZE"]):
            torch.distributed.init_process_group("gloo")
    """,
    "train.py:2 calls is_torchelastic_launched": """
        import torch.distributed as dist
        if dist.is_torchelastic_launched():
            dist.init_process_group()
    """,
    "train.py:3 parses --local_rank": """
        import argparse, torch
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=-1)
        if parser.parse_args().local_rank != -1:
            torch.distributed.init_process_group("nccl")
    """,
}


@pytest.mark.parametrize(("reason", "source"), EITHER.items(), ids=EITHER)
def test_a_script_that_can_be_either_is_plain(tell, reason: str, source: str) -> None:
    script = tell(source)
    assert (script.kind, script.reason) == (Kind.PLAIN, reason.strip())
    assert script.can_be_either


@pytest.mark.parametrize("words", ["devices=2", "devices=[0, 1]", "num_nodes=2", "strategy='ddp_spawn'"])
def test_a_script_that_asks_a_library_for_several_ranks_is_launched(tell, words: str) -> None:
    script = tell(f"import lightning as L\nL.Trainer({words})\n")
    assert (script.kind, script.reason) == (Kind.DISTRIBUTED, f"train.py:2 calls lightning's Trainer with {words}")
    assert script.can_be_either


@pytest.mark.parametrize("words", ["devices=1", "devices='auto'", "strategy='auto'", "devices=args.devices"])
def test_a_script_that_leaves_its_devices_open_is_plain(tell, words: str) -> None:
    assert tell(f"import lightning as L\nL.Trainer({words})\n").kind is Kind.PLAIN


BY_ARGUMENTS = {
    "under a condition": """
        import argparse, torch.distributed as dist
        args = argparse.ArgumentParser().parse_args()
        if args.distributed:
            dist.init_process_group("nccl")
    """,
    "under conditions of which one leads nowhere": """
        import torch.distributed as dist
        def main(args):
            if args.distributed:
                dist.init_process_group("nccl")
            elif args.cpu:
                print("no")
            else:
                dist.init_process_group("gloo")
        main(None)
    """,
    "in a function that is called under a condition": """
        import sys, torch.distributed as dist
        def start():
            if not dist.is_initialized():
                dist.init_process_group("nccl")
        def main(args):
            if args.distributed:
                start()
        main(sys.argv)
    """,
}


@pytest.mark.parametrize("source", BY_ARGUMENTS.values(), ids=BY_ARGUMENTS)
def test_what_only_arguments_can_choose_is_plain_until_told_otherwise(tell, source: str) -> None:
    script = tell(source)
    assert (script.kind, script.reason) == (
        Kind.PLAIN,
        "train.py:4 calls init_process_group only under a condition",
    )
    assert script.can_be_either


@pytest.mark.parametrize(
    "use", ["duoka.start()", "duoka.launch(print, devices=2)", "from duoka import start; start(seed=0)"]
)
def test_api(tell, use: str) -> None:
    script = tell(f"import duoka, os\nprint(os.environ['RANK'])\n{use}")
    assert script.kind is Kind.API
    assert script.reason in ("train.py:3 calls start", "train.py:3 calls launch")


def test_importing_duoka_alone_is_not_its_api(tell) -> None:
    assert tell("import duoka\nprint(duoka.__version__)").kind is Kind.PLAIN


def test_signs_are_found_in_local_imports(tell) -> None:
    script = tell(
        "from setup import start\nstart()",
        setup="import torch\ndef start():\n    torch.distributed.init_process_group()",
    )
    assert (script.kind, script.reason) == (Kind.DISTRIBUTED, "setup.py:3 calls init_process_group")


def test_what_nobody_calls_in_a_local_import_is_no_sign(tell) -> None:
    script = tell(
        "from setup import seed\nseed()",
        setup="import torch\ndef start():\n    torch.distributed.init_process_group()\ndef seed(): pass",
    )
    assert script.kind is Kind.PLAIN


def test_what_a_command_line_library_calls_is_a_sign(tell) -> None:
    source = """
        import fire, torch
        def train(lr=0.1):
            torch.distributed.init_process_group()
        fire.Fire()
        """
    assert tell(source).kind is Kind.DISTRIBUTED


SELF_LAUNCHING = {
    "train.py:4 gives init_process_group a rank of its own": """
        import os, torch.distributed as dist, torch.multiprocessing as mp
        def work(rank, size):
            os.environ["MASTER_PORT"] = "12355"
            dist.init_process_group("gloo", rank=rank, world_size=size)
        if __name__ == "__main__":
            mp.spawn(work, args=(2,), nprocs=2)
    """,
    "train.py:3 gives init_process_group a rank of its own": """
        import torch.distributed as dist, torch.multiprocessing as mp
        def work(rank):
            dist.init_process_group("gloo", rank=rank, world_size=2)
        context = mp.get_context("spawn")
        for rank in range(2):
            context.Process(target=work, args=(rank,)).start()
    """,
    "train.py:3 sets RANK itself": """
        import os, torch.distributed as dist
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
        os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
        dist.init_process_group("gloo")
    """,
}


@pytest.mark.parametrize(("reason", "source"), SELF_LAUNCHING.items(), ids=SELF_LAUNCHING)
def test_a_script_with_ranks_of_its_own(tell, reason: str, source: str) -> None:
    script = tell(source)
    assert (script.kind, script.reason) == (Kind.DISTRIBUTED, reason)
    assert script.self_launching


def test_processes_beside_the_ranks_are_no_ranks_of_its_own(tell) -> None:
    source = """
        import torch.distributed as dist, torch.multiprocessing as mp
        dist.init_process_group("gloo")
        mp.spawn(print, nprocs=2)
        """
    script = tell(source)
    assert (script.kind, script.self_launching) == (Kind.DISTRIBUTED, False)


def test_a_script_that_spawns_only_without_a_launcher_is_launched(tell) -> None:
    source = """
        import os, torch.distributed as dist, torch.multiprocessing as mp
        def work(rank):
            dist.init_process_group("gloo")
        if "RANK" in os.environ:
            work(int(os.environ["RANK"]))
        else:
            mp.spawn(lambda rank: dist.init_process_group("gloo", rank=rank, world_size=2), nprocs=2)
        """
    script = tell(source)
    assert (script.kind, script.self_launching) == (Kind.DISTRIBUTED, False)


@pytest.mark.parametrize("flag", ["--local_rank", "--local-rank"])
def test_the_spelling_of_the_flag_is_remembered(tell, flag: str) -> None:
    source = f"import argparse\nargparse.ArgumentParser().add_argument('{flag}', type=int)"
    assert tell(source).local_rank_flag == flag
    assert tell("import common", common=source).local_rank_flag == flag
    assert tell(f"print('{flag}' in {{}})").local_rank_flag is None


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("parser.add_argument('--devices')", True),
        ("parser.add_argument('-d', '--devices', default='cpu')", True),
        ("opts, _ = getopt.getopt(words, 'd', ['devices='])", True),
        ("import sys; print(sys.argv[1:])", True),
        ("from sys import argv; print(argv)", True),
        ("import fire\ndef train(devices): pass\nfire.Fire(train)", True),
        ("from transformers import HfArgumentParser\nclass Arguments:\n    devices: str = ''", True),
        ("def train(devices): pass", False),
        ("parser.add_argument('--device')", False),
        ("'''duoka run train.py --devices 0,3'''", False),
        ("print({'devices': 3})", False),
    ],
)
def test_which_options_a_script_takes_itself(tell, source: str, takes: bool) -> None:
    assert tell(source).takes("--devices") is takes


def test_an_options_dashes_are_as_good_as_underscores(tell) -> None:
    assert tell("parser.add_argument('--log_dir')").takes("--log-dir")
