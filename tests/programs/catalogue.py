"""The programs: where each lies, how it is run small, and the data it wants.

examples/           pytorch/examples
nanoGPT/ minGPT/    karpathy's
(here) scripts/     hand-written loops over transformers' models, which must be installed
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).parent / "scripts"
TEXT = 40_000  # characters


@dataclass(frozen=True)
class Program:
    """One program as it is run.

    script: below the programs' folder, or below `scripts`. args: its own words. prepare: makes its data in the folder
    where it runs. saved: what it saves. options: of `duoka run`. needs: a package that it imports. seeds: whether it
    seeds its random numbers itself. env: variables that it needs.
    """

    name: str
    script: str
    args: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda folder: None
    saved: str = "*.pt*"
    options: tuple[str, ...] = ()
    needs: str = "torch"
    seeds: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    def copy(self, programs: Path, folder: Path) -> Path:
        """Copy what the program consists of into `folder`, make its data, and give the script's path there."""
        source = (SCRIPTS if self.needs != "torch" else programs) / self.script
        top = programs / "minGPT" if "minGPT" in source.parts else source.parent
        shutil.copytree(top, folder, dirs_exist_ok=True)
        self.prepare(folder)
        return folder / source.relative_to(top)


def words(folder: Path) -> None:
    """Three files of sentences."""
    rng = random.Random(0)
    for name, lines in (("train", 300), ("valid", 60), ("test", 60)):
        text = "\n".join(" ".join(f"w{int(rng.expovariate(0.05))}" for _ in range(20)) for _ in range(lines))
        (folder / f"{name}.txt").write_text(text + "\n")


def text(folder: Path) -> None:
    """A text of words that come again."""
    rng = random.Random(0)
    known = ["O God, O God!", *("".join(rng.choices("abcdefghij ", k=6)) for _ in range(40))]
    (folder / "input.txt").write_text(" ".join(rng.choices(known, k=TEXT // 7)))


def tokens(folder: Path) -> None:
    """Characters as numbers of 16 bits, with their vocabulary."""
    where = folder / "data" / "small"
    where.mkdir(parents=True)
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 3, TEXT)
    for name, numbers in (("train", steps.cumsum() % 64), ("val", steps[::-1].cumsum() % 64)):
        numbers.astype(np.uint16).tofile(where / f"{name}.bin")
    (where / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def waves(folder: Path) -> None:
    """What its generate_sine_wave.py makes, shorter."""
    import torch

    rng = np.random.default_rng(2)
    x = np.arange(60) + rng.integers(-80, 80, (24, 1))
    torch.save(np.sin(x / 20), folder / "traindata.pt")


def pictures(folder: Path) -> None:
    """Pictures in the folders of BSDS300."""
    rng = np.random.default_rng(0)
    for part, n in (("train", 24), ("test", 10)):
        where = folder / "dataset" / "BSDS300" / "images" / part
        where.mkdir(parents=True)
        for number in range(n):
            with open(where / f"{number}.jpg", "wb") as file:
                np.savez(file, picture=rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))


def results(folder: Path) -> None:
    """The folder that the program expects."""
    (folder / "results").mkdir(exist_ok=True)


OLD_PICKLES = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # a program older than torch 2.6
PLAIN = ("--kind", "plain")  # a program that can do both
SMALL_GPT = (
    "--dataset=small --device=cpu --compile=False --n_layer=2 --n_head=2 --n_embd=64 --block_size=32 --batch_size=8 "
    "--max_iters=12 --eval_interval=6 --eval_iters=3 --gradient_accumulation_steps=3 --dropout=0.1 --dtype=float32"
)
SMALL_GAN = "--dataset fake --niter 1 --imageSize 64 --ngf 8 --ndf 8 --manualSeed 1 --batchSize 20"
SMALL_VIT = "--img-size 64 --latent-size 48 --num-heads 4 --num-encoders 2 --lr 1e-4"


def _program(name: str, script: str, args: str = "", **how: object) -> Program:
    return Program(name, script, tuple(args.split()), **how)  # type: ignore[arg-type]


E = "examples"
PROGRAMS = [
    _program("mnist", f"{E}/mnist/main.py", "--epochs 2 --save-model"),
    _program("mnist_rnn", f"{E}/mnist_rnn/main.py", "--epochs 2 --save-model"),
    _program("vae", f"{E}/vae/main.py", "--epochs 2 --batch-size 64", prepare=results, saved="results/*"),
    _program("dcgan", f"{E}/dcgan/main.py", SMALL_GAN),
    _program("dcgan_no_workers", f"{E}/dcgan/main.py", f"{SMALL_GAN} --workers 0"),
    _program("regression", f"{E}/regression/main.py", seeds=False),
    _program(
        "time_sequence",
        f"{E}/time_sequence_prediction/train.py",
        "--steps 2",
        prepare=waves,
        saved="*.pdf",
        env=OLD_PICKLES,
    ),
    _program("siamese", f"{E}/siamese_network/main.py", "--epochs 1 --save-model"),
    _program(
        "forward_forward",
        f"{E}/mnist_forward_forward/main.py",
        "--epochs 21 --lr 0.001 --train_size 200 --test_size 100 --save_model",
    ),
    _program("vit", f"{E}/vision_transformer/main.py", f"{SMALL_VIT} --epochs 1 --batch-size 32", seeds=False),
    _program(
        "super_resolution",
        f"{E}/super_resolution/main.py",
        "--upscale_factor 2 --nEpochs 2 --batchSize 6 --threads 0",
        prepare=pictures,
    ),
    *(
        _program(
            f"word_language_model_{kind}",
            f"{E}/word_language_model/main.py",
            f"--data . --model {kind} --emsize 32 --nhid 32 --epochs 2 --log-interval 5 --batch_size 8 {more}",
            prepare=words,
        )
        for kind, more in (("LSTM", ""), ("RNN_TANH", "--tied --lr 2"), ("GRU", "--lr 5"), ("Transformer", "--lr 5"))
    ),
    _program(
        "snli",
        f"{E}/legacy/snli/train.py",
        "--word_vectors= --epochs 1 --batch_size 32 --d_embed 24 --d_proj 24 --d_hidden 24",
    ),
    _program(
        "imagenet", f"{E}/imagenet/main.py", "--dummy -a resnet18 --epochs 1 -j 0 -b 20 -p 1 --seed 0", options=PLAIN
    ),
    _program("nanoGPT", "nanoGPT/train.py", SMALL_GPT, prepare=tokens, saved="out/*.pt", options=PLAIN),
    _program(
        "minGPT_adder",
        "minGPT/projects/adder/adder.py",
        "--trainer.max_iters=22 --trainer.num_workers=0 --data.ndigit=1",
        saved="out/adder/*.pt",
    ),
    _program(
        "minGPT_chargpt",
        "minGPT/projects/chargpt/chargpt.py",
        "--trainer.max_iters=12 --trainer.num_workers=1 --model.model_type=gpt-nano --data.block_size=32",
        prepare=text,
        saved="out/chargpt/*.pt",
    ),
    _program("bert", "bert.py", needs="transformers"),
    _program("gpt2", "gpt2.py", needs="transformers"),
    _program("t5_vit", "t5_vit.py", needs="transformers"),
    _program("pretrained", "pretrained.py", needs="transformers"),
    _program("hugging_face_trainer", "hugging_face_trainer.py", needs="transformers", options=PLAIN),
    _program("accelerate", "accelerated.py", needs="accelerate", saved="weights.pt", options=PLAIN),
    _program("fabric", "fabric.py", needs="lightning", options=PLAIN),
    _program("lightning", "lightning_trainer.py", needs="lightning", options=PLAIN),
]
