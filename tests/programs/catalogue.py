"""The programs: where each lies, how it is run small, and the data it wants.

A program's path begins with the folder of its repository (`REPOSITORIES`), below the one that is given. The path of
one that this project has, a loop over other people's models, is below `scripts`.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).parent / "scripts"
TEXT = 40_000  # characters


@dataclass(frozen=True)
class Program:
    """One program as it is run.

    script: below the programs' folder, or below `scripts`. field: what it does. args: its own words. prepare: makes
    its data in the folder where it runs. saved: what it saves. options: of `duoka run`. needs: a package that it
    imports. steps: after which it ends; 0: at its own end; None: there, and it seeds its random numbers itself.
    env: variables that it needs. whole: the folder that is copied, where it is not the script's own.
    """

    name: str
    script: str
    field: str
    args: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda folder: None
    saved: str = "*.pt*"
    options: tuple[str, ...] = ()
    needs: str = "torch"
    steps: int | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    whole: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether this project has it."""
        return "/" not in self.script

    def copy(self, programs: Path, folder: Path) -> Path:
        """Copy what the program consists of into `folder`, make its data, and give the script's path there."""
        source = (SCRIPTS if self.is_ours else programs) / self.script
        top = programs / self.whole if self.whole else source.parent
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


def citations(folder: Path) -> None:
    """What torch_geometric reads for Planetoid's Cora, smaller: 20 documents to learn from, 500 to validate by."""
    from scipy.sparse import csr_matrix  # torch_geometric has it

    raw = folder.parent / "data" / "Planetoid" / "Cora" / "raw"
    if raw.exists():
        return
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    known, tested, words = 600, 100, 32
    kinds = rng.integers(0, 7, known + tested)
    texts = (rng.random((known + tested, words)) < 0.1 + 0.4 * (np.arange(words) % 7 == kinds[:, None])).astype("f4")
    targets = np.eye(7, dtype=np.int32)[kinds]
    places = {"": slice(20), "all": slice(known), "t": slice(known, None)}
    content = {f"{part}x": csr_matrix(texts[rows]) for part, rows in places.items()}
    content |= {f"{part}y": targets[rows] for part, rows in places.items()}
    graph = {one: rng.integers(0, known + tested, 4).tolist() for one in range(known + tested)}
    for name, value in {**content, "graph": graph}.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(value))
    (folder.parent / "data" / "Cora").symlink_to("Planetoid")  # where some look for it
    (raw / "ind.cora.test.index").write_text("\n".join(map(str, range(known, known + tested))))


def results(folder: Path) -> None:
    """The folder that the program expects."""
    (folder / "results").mkdir(exist_ok=True)


OLD_PICKLES = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # a program older than torch 2.6
SMALL_GPT = (
    "--dataset=small --device=cpu --compile=False --n_layer=2 --n_head=2 --n_embd=64 --block_size=32 --batch_size=8 "
    "--max_iters=12 --eval_interval=6 --eval_iters=3 --gradient_accumulation_steps=3 --dropout=0.1 --dtype=float32"
)
SMALL_GAN = "--dataset fake --niter 1 --imageSize 64 --ngf 8 --ndf 8 --manualSeed 1 --batchSize 20"
SMALL_VIT = "--img-size 64 --latent-size 48 --num-heads 4 --num-encoders 2 --lr 1e-4"


def _program(field: str, name: str, script: str, args: str = "", **how: object) -> Program:
    return Program(name, script, field, tuple(args.split()), **how)  # type: ignore[arg-type]


def _tutorial(name: str, steps: int = 40) -> Program:
    script = {
        "Skipgram": "1-2.Word2Vec/Word2Vec-Skipgram(Softmax)",
        "Greedy": "5-1.Transformer/Transformer(Greedy_decoder)",
    }
    path = script.get(name, name)
    label = path.rpartition("/")[2].lower()
    return _program("text", f"nlp_tutorial_{label}", f"nlp-tutorial/{path}.py", steps=steps, saved="*.nothing")


def _gan(name: str) -> Program:
    args = "--n_epochs 2 --batch_size 64 --n_cpu 1 --sample_interval 4"
    return _program(
        "generative", name, f"PyTorch-GAN/implementations/{name}/{name}.py", args, steps=12, saved="images/*"
    )


def _graph(name: str, args: str = "") -> Program:
    how = {"steps": 12, "needs": "torch_geometric", "prepare": citations, "saved": "*.nothing"}
    return _program("graphs", f"pyg_{name}", f"pytorch_geometric/examples/{name}.py", args, **how)


def _game(name: str, steps: int = 20) -> Program:
    return _program("reinforcement", f"minimalRL_{name}", f"minimalRL/{name}.py", steps=steps, needs="gymnasium")


def _clean(name: str, args: str) -> Program:
    how = {"needs": "tyro", "whole": "cleanrl", "saved": "*.nothing", "steps": 12}
    return _program("reinforcement", f"cleanrl_{name}", f"cleanrl/cleanrl/{name}.py", f"--no-cuda {args}", **how)


def _lesson(field: str, name: str, steps: int = 12) -> Program:
    script = f"pytorch-tutorial/tutorials/{name}/main.py"
    return _program(field, f"yunjey_{name.rpartition('/')[2]}", script, steps=steps, saved="*.ckpt")


E = "examples"
REPOSITORIES = {
    "examples": "pytorch/examples",
    "nanoGPT": "karpathy/nanoGPT",
    "minGPT": "karpathy/minGPT",
    "makemore": "karpathy/makemore",
    "ng-video-lecture": "karpathy/ng-video-lecture",
    "nlp-tutorial": "graykode/nlp-tutorial",
    "TCN": "locuslab/TCN",
    "pytorch-tutorial": "yunjey/pytorch-tutorial",
    "PyTorch-GAN": "eriklindernoren/PyTorch-GAN",
    "pytorch_geometric": "pyg-team/pytorch_geometric",
    "minimalRL": "seungeunrho/minimalRL",
    "cleanrl": "vwxyzjn/cleanrl",
    "pytorch-lightning": "Lightning-AI/pytorch-lightning",
}
SMALL_MORE = "--n-layer 2 --n-embd 32 --n-embd2 32 --max-steps 12 --num-workers 0"
L = "pytorch-lightning/examples"

PROGRAMS = [
    _program("vision", "mnist", f"{E}/mnist/main.py", "--epochs 2 --save-model"),
    _program("vision", "mnist_rnn", f"{E}/mnist_rnn/main.py", "--epochs 2 --save-model"),
    _program("vision", "siamese", f"{E}/siamese_network/main.py", "--epochs 1 --save-model"),
    _program(
        "vision",
        "forward_forward",
        f"{E}/mnist_forward_forward/main.py",
        "--epochs 21 --lr 0.001 --train_size 200 --test_size 100 --save_model",
    ),
    _program("vision", "vit", f"{E}/vision_transformer/main.py", f"{SMALL_VIT} --epochs 1 --batch-size 32", steps=0),
    _program(
        "vision",
        "super_resolution",
        f"{E}/super_resolution/main.py",
        "--upscale_factor 2 --nEpochs 2 --batchSize 6 --threads 0",
        prepare=pictures,
    ),
    _program(
        "vision", "imagenet", f"{E}/imagenet/main.py", "--dummy -a resnet18 --epochs 1 -j 0 -b 20 -p 1 --seed 0"
    ),
    _lesson("vision", "01-basics/logistic_regression"),
    _lesson("vision", "01-basics/feedforward_neural_network"),
    _lesson("vision", "02-intermediate/convolutional_neural_network"),
    _lesson("vision", "02-intermediate/recurrent_neural_network"),
    _lesson("vision", "02-intermediate/bidirectional_recurrent_neural_network"),
    *(
        _program(
            "text",
            f"word_language_model_{kind}",
            f"{E}/word_language_model/main.py",
            f"--data . --model {kind} --emsize 32 --nhid 32 --epochs 2 --log-interval 5 --batch_size 8 {more}",
            prepare=words,
        )
        for kind, more in (("LSTM", ""), ("RNN_TANH", "--tied --lr 2"), ("GRU", "--lr 5"), ("Transformer", "--lr 5"))
    ),
    _program(
        "text",
        "snli",
        f"{E}/legacy/snli/train.py",
        "--word_vectors= --epochs 1 --batch_size 32 --d_embed 24 --d_proj 24 --d_hidden 24",
    ),
    _program("text", "nanoGPT", "nanoGPT/train.py", SMALL_GPT, prepare=tokens, saved="out/*.pt"),
    _program(
        "text",
        "minGPT_adder",
        "minGPT/projects/adder/adder.py",
        "--trainer.max_iters=22 --trainer.num_workers=0 --data.ndigit=1",
        saved="out/adder/*.pt",
        whole="minGPT",
    ),
    _program(
        "text",
        "minGPT_chargpt",
        "minGPT/projects/chargpt/chargpt.py",
        "--trainer.max_iters=12 --trainer.num_workers=1 --model.model_type=gpt-nano --data.block_size=32",
        prepare=text,
        saved="out/chargpt/*.pt",
        whole="minGPT",
    ),
    *(
        _program("text", f"makemore_{kind}", "makemore/makemore.py", f"--type {kind} {SMALL_MORE}", saved="out/*.pt")
        for kind in ("transformer", "gru", "mlp")
    ),
    _program("text", "bigram", "ng-video-lecture/bigram.py", steps=12),
    *map(_tutorial, ("1-1.NNLM/NNLM", "Skipgram", "2-1.TextCNN/TextCNN", "3-1.TextRNN/TextRNN")),
    *map(_tutorial, ("3-2.TextLSTM/TextLSTM", "3-3.Bi-LSTM/Bi-LSTM", "4-1.Seq2Seq/Seq2Seq")),
    *map(_tutorial, ("4-2.Seq2Seq(Attention)/Seq2Seq(Attention)", "4-3.Bi-LSTM(Attention)/Bi-LSTM(Attention)")),
    *(_tutorial(name, steps=6) for name in ("5-1.Transformer/Transformer", "Greedy", "5-2.BERT/BERT")),
    _program(
        "text",
        "TCN_copy_memory",
        "TCN/TCN/copy_memory/copymem_test.py",
        "--iters 8 --epochs 1 --blank_len 20 --levels 3 --log-interval 4",
        whole="TCN",
        steps=12,
    ),
    *(_graph(name) for name in ("dna", "arma", "tagcn", "agnn", "mixhop", "infomax_transductive", "super_gat")),
    *(_graph(name) for name in ("graph_unet", "pmlp", "link_pred")),
    *(_graph(name, "--epochs 12") for name in ("gcn", "gat", "autoencoder")),
    *(_game(name) for name in ("REINFORCE", "actor_critic", "dqn", "ppo", "ppo-lstm", "vtrace")),
    *(_game(name, steps=8) for name in ("ppo-continuous", "ddpg", "sac")),
    _clean("dqn", "--total-timesteps 200 --learning-starts 40 --batch-size 32"),
    _clean("c51", "--total-timesteps 120 --learning-starts 40 --batch-size 32"),
    _clean("ppo", "--total-timesteps 256 --num-steps 32 --num-envs 2"),
    _program(
        "generative", "vae", f"{E}/vae/main.py", "--epochs 2 --batch-size 64", prepare=results, saved="results/*"
    ),
    _program("generative", "dcgan_examples", f"{E}/dcgan/main.py", SMALL_GAN),
    _program("generative", "dcgan_no_workers", f"{E}/dcgan/main.py", f"{SMALL_GAN} --workers 0"),
    *map(_gan, ["gan", "wgan", "wgan_gp", "lsgan", "acgan", "cgan", "infogan", "aae", "sgan", "wgan_div"]),
    _lesson("generative", "03-advanced/variational_autoencoder"),
    _lesson("generative", "03-advanced/generative_adversarial_network", steps=6),
    _program("other", "regression", f"{E}/regression/main.py", steps=0),
    _program(
        "other",
        "time_sequence",
        f"{E}/time_sequence_prediction/train.py",
        "--steps 2",
        prepare=waves,
        saved="*.pdf",
        env=OLD_PICKLES,
    ),
    _program("libraries", "bert", "bert.py", needs="transformers"),
    _program("libraries", "gpt2", "gpt2.py", needs="transformers"),
    _program("libraries", "t5_vit", "t5_vit.py", needs="transformers"),
    _program("libraries", "pretrained", "pretrained.py", needs="transformers"),
    _program("libraries", "hugging_face_trainer", "hugging_face_trainer.py", needs="transformers"),
    _program("libraries", "accelerate", "accelerated.py", needs="accelerate", saved="weights.pt"),
    _program("libraries", "fabric", "fabric.py", needs="lightning"),
    _program("libraries", "lightning", "lightning_trainer.py", needs="lightning"),
    _program(
        "libraries", "lightning_bug_report", f"{L}/pytorch/bug_report/bug_report_model.py", needs="lightning", steps=0
    ),
    _program(
        "libraries",
        "lightning_mnist",
        f"{L}/fabric/image_classifier/train_torch.py",
        "--epochs 1 --batch-size 64 --save-model",
    ),
]
PROGRAMS += [
    dataclasses.replace(program, name=f"{program.name}_fsdp", options=(*program.options, "--strategy", "fsdp"))
    for program in PROGRAMS
    if program.is_ours or program.name in ("minGPT", "nanoGPT", "transformer")
]
