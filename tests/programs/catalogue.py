"""The programs: where each lies, how it is run small, and the data it wants.

A program's path begins with the folder of its repository (`REPOSITORIES`), below the one that is given. The path of
one that this project has, a loop over other people's models, is below `scripts`.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.programs import data

SCRIPTS = Path(__file__).parent / "scripts"
STANDINS = Path(__file__).parent / "standins"


@dataclass(frozen=True)
class Program:
    """One program as it is run.

    script: below the programs' folder, or below `scripts`. field: what it does. args: its own words. prepare: makes
    its data in the folder where it runs. saved: what it saves. options: of `duoka run`. needs: a package that it
    imports. steps: after which it ends; 0: at its own end; None: there, and it seeds its random numbers itself.
    env: variables that it needs. whole: the folder that is copied, where it is not the script's own. stood_in: the
    packages in `standins` that it gets, where it does not get them all.
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
    stood_in: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether this project has it."""
        return "/" not in self.script

    def copy(self, programs: Path, folder: Path) -> Path:
        """Copy what the program consists of into `folder`, make its data, and give the script's path there."""
        source = (SCRIPTS if self.is_ours else programs) / self.script
        top = programs / self.whole if self.whole else source.parent
        shutil.copytree(top, folder, dirs_exist_ok=True)
        for name in self.stood_in:
            shutil.copytree(STANDINS / name, folder / name)
        self.prepare(folder)
        return folder / source.relative_to(top)


OLD_PICKLES = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # a program older than torch 2.6
SMALL_GPT = (
    "--dataset=small --device=cpu --compile=False --n_layer=2 --n_head=2 --n_embd=64 --block_size=32 --batch_size=8 "
    "--max_iters=12 --eval_interval=6 --eval_iters=3 --gradient_accumulation_steps=3 --dropout=0.1 --dtype=float32"
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_CACHE": "cached"}
SMALL_TAUGHT = (
    "--model_name_or_path llama --output_dir out --report_to none --use_cpu --max_steps 20 --logging_steps 2 "
    "--per_device_train_batch_size 8 --eval_strategy steps --eval_steps 4 --disable_tqdm true --learning_rate 1e-3 "
    "--bf16 false --dtype float32"
)
SMALL_GAN = "--dataset fake --niter 1 --imageSize 64 --ngf 8 --ndf 8 --manualSeed 1 --batchSize 20"
SMALL_CONTROL = "--env-id Pendulum-v1 --total-timesteps 200 --learning-starts 40 --batch-size 32 --buffer-size 500"
SMALL_DIFFUSION = (
    "--num_epochs 1 --num_timesteps 10 --hidden_size 32 --embedding_size 32 --eval_batch_size 50 "
    "--train_batch_size 256"
)
SMALL_DLRM = (
    "--data-size 160 --print-freq 2 --arch-sparse-feature-size 8 --arch-mlp-bot 4-16-8 --arch-mlp-top 16-1 "
    "--arch-embedding-size 30-40-20 --nepochs 1"
)
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


def _graph(name: str, args: str = "", prepare: Callable[[Path], None] = data.citations, steps: int = 12) -> Program:
    how = {"steps": steps, "needs": "torch_geometric", "prepare": prepare, "saved": "*.nothing"}
    return _program("graphs", f"pyg_{name}", f"pytorch_geometric/examples/{name}.py", args, **how)


def _accelerated(name: str, args: str = "") -> Program:
    script = f"accelerate/examples/{name}.py"
    how = {"needs": "datasets", "stood_in": ("evaluate",), "prepare": data.glue, "saved": "*.nothing", "env": OFFLINE}
    name = f"accelerate_{name.rpartition('/')[2]}"
    return _program("libraries", name, script, f"--cpu {args}", steps=25, **how)


def _taught(name: str, rows: str) -> Program:
    chosen = f"{SMALL_TAUGHT} --dataset_name {rows}"
    how = {"needs": "trl", "prepare": data.chats, "saved": "*.nothing", "steps": 8, "env": OFFLINE}
    return _program("libraries", f"trl_{name}", f"trl/trl/scripts/{name}.py", chosen, **how)


def _tuned(name: str, args: str = "") -> Program:
    chosen = (
        "--base_model_name_or_path llama --data_path spoken --dataset_split train --dataset_field query response "
        "--output_dir out --report_to none --use_cpu --max_steps 8 --logging_steps 1 --disable_tqdm true "
        f"--per_device_train_batch_size 8 --learning_rate 1e-3 {args}"
    )
    how = {"needs": "peft", "prepare": data.answers, "saved": "*.nothing", "steps": 0, "env": OFFLINE}
    return _program("libraries", f"peft_{name}", f"peft/examples/{name}/{name}.py", chosen, **how)


def _lightning(name: str, args: str = "", steps: int = 12, **how: object) -> Program:
    given = {"needs": "lightning", "stood_in": ("torchvision",), "saved": "*.nothing", **how}
    folder, _, last = name.rpartition("/")
    label = f"lightning_{folder.rpartition('/')[2]}_{last}"
    return _program("libraries", label, f"{L}/{name}.py", args, steps=steps, **given)


def _game(name: str, steps: int = 20) -> Program:
    return _program("reinforcement", f"minimalRL_{name}", f"minimalRL/{name}.py", steps=steps, needs="gymnasium")


def _clean(name: str, args: str) -> Program:
    how = {"needs": "tyro", "whole": "cleanrl", "saved": "*.nothing", "steps": 12}
    return _program("reinforcement", f"cleanrl_{name}", f"cleanrl/cleanrl/{name}.py", f"--no-cuda {args}", **how)


def _lesson(field: str, name: str, steps: int = 12) -> Program:
    script = f"pytorch-tutorial/tutorials/{name}/main.py"
    return _program(field, f"yunjey_{name.rpartition('/')[2]}", script, steps=steps, saved="*.ckpt")


E = "examples"
GAMES = {"needs": "gymnasium", "saved": "*.nothing"}
DIFFUSED = {"needs": "pandas", "saved": "exps/**/*.pth", "steps": 0}
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
    "accelerate": "huggingface/accelerate",
    "trl": "huggingface/trl",
    "peft": "huggingface/peft",
    "dlrm": "facebookresearch/dlrm",
    "tiny-diffusion": "tanelp/tiny-diffusion",
    "torchdiffeq": "rtqichen/torchdiffeq",
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
        steps=0,  # it has a --seed, and does not use it
    ),
    _program("vision", "vit", f"{E}/vision_transformer/main.py", f"{SMALL_VIT} --epochs 1 --batch-size 32", steps=0),
    _program(
        "vision",
        "super_resolution",
        f"{E}/super_resolution/main.py",
        "--upscale_factor 2 --nEpochs 2 --batchSize 6 --threads 0",
        prepare=data.pictures,
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
            prepare=data.words,
        )
        for kind, more in (("LSTM", ""), ("RNN_TANH", "--tied --lr 2"), ("GRU", "--lr 5"), ("Transformer", "--lr 5"))
    ),
    _program(
        "text",
        "snli",
        f"{E}/legacy/snli/train.py",
        "--word_vectors= --epochs 1 --batch_size 32 --d_embed 24 --d_proj 24 --d_hidden 24",
    ),
    _program("text", "nanoGPT", "nanoGPT/train.py", SMALL_GPT, prepare=data.tokens, saved="out/*.pt"),
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
        prepare=data.text,
        saved="out/chargpt/*.pt",
        whole="minGPT",
    ),
    *(
        _program(
            "text",
            f"makemore_{kind}",
            "makemore/makemore.py",
            f"--type {kind} {SMALL_MORE}",
            saved="out/*.pt",
            needs="tensorboard",
        )
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
        "--iters 8 --epochs 1 --blank_len 20 --levels 3 --log-interval 4 --cuda",
        whole="TCN",
        steps=12,
    ),
    *(_graph(name) for name in ("dna", "arma", "tagcn", "agnn", "mixhop", "infomax_transductive", "super_gat")),
    *(_graph(name) for name in ("graph_unet", "pmlp", "link_pred")),
    *(_graph(name, "--epochs 12") for name in ("gcn", "gat", "autoencoder")),
    *(_graph(name) for name in ("gcn2_cora", "sgc", "glnn", "ogc", "tensorboard_logging")),
    _graph("mutag_gin", "--batch_size 32", prepare=data.graphs),
    *(_graph(name, prepare=data.graphs) for name in ("proteins_topk_pool", "proteins_diff_pool", "proteins_gmt")),
    *(_graph(name, prepare=data.graphs) for name in ("proteins_dmon_pool", "proteins_mincut_pool", "mem_pool")),
    _graph("equilibrium_median", steps=40),
    *(_graph(name, prepare=data.proteins) for name in ("ppi", "film", "geniepath")),
    _graph("signed_gcn", prepare=data.ratings),
    _graph("pna", prepare=data.molecules),
    *(_game(name) for name in ("REINFORCE", "actor_critic", "dqn", "ppo", "ppo-lstm", "vtrace")),
    *(_game(name, steps=8) for name in ("ppo-continuous", "ddpg", "sac")),
    _clean("dqn", "--total-timesteps 200 --learning-starts 40 --batch-size 32"),
    _clean("c51", "--total-timesteps 120 --learning-starts 40 --batch-size 32"),
    _clean("ppo", "--total-timesteps 256 --num-steps 32 --num-envs 2"),
    _clean("pqn", "--total-timesteps 256 --num-steps 16 --num-envs 2"),
    *(_clean(f"{name}_continuous_action", SMALL_CONTROL) for name in ("ddpg", "td3", "sac")),
    *(
        _program("reinforcement", f"examples_{name}", f"{E}/reinforcement_learning/{name}.py", steps=4, **GAMES)
        for name in ("reinforce", "actor_critic")
    ),
    _program(
        "generative", "vae", f"{E}/vae/main.py", "--epochs 2 --batch-size 64", prepare=data.results, saved="results/*"
    ),
    _program("generative", "dcgan_examples", f"{E}/dcgan/main.py", SMALL_GAN),
    _program("generative", "dcgan_no_workers", f"{E}/dcgan/main.py", f"{SMALL_GAN} --workers 0"),
    *map(_gan, ["gan", "wgan", "wgan_gp", "lsgan", "acgan", "cgan", "infogan", "aae", "sgan", "wgan_div"]),
    _lesson("generative", "03-advanced/variational_autoencoder"),
    _lesson("generative", "03-advanced/generative_adversarial_network", steps=6),
    *(
        _program(
            "generative", f"tiny_diffusion_{kind}", "tiny-diffusion/ddpm.py", f"{SMALL_DIFFUSION} {args}", **DIFFUSED
        )
        for kind, args in (
            ("moons", "--dataset moons"),
            ("circle", "--dataset circle --time_embedding learnable --beta_schedule quadratic"),
        )
    ),
    *(
        _program(
            "other", f"dlrm_{size}", "dlrm/dlrm_s_pytorch.py", f"{SMALL_DLRM} {args}", needs="tensorboard", steps=0
        )
        for size, args in (
            (16, "--mini-batch-size 16"),
            (17, "--mini-batch-size 17 --test-freq 4 --loss-function bce --num-indices-per-lookup 3"),
        )
    ),
    _program(
        "other",
        "neural_ode",
        "torchdiffeq/examples/ode_demo.py",
        "--niters 4 --test_freq 2 --data_size 200",
        saved="*.nothing",
        needs="scipy",
        whole="torchdiffeq",
        steps=4,
    ),
    _program("other", "regression", f"{E}/regression/main.py", steps=0),
    _program(
        "other",
        "time_sequence",
        f"{E}/time_sequence_prediction/train.py",
        "--steps 2",
        prepare=data.waves,
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
    _lightning("fabric/image_classifier/train_fabric", "--epochs 1 --batch-size 64"),
    _lightning("fabric/kfold_cv/train_fabric", "--epochs 1 --batch-size 64"),
    _lightning("fabric/language_model/train", prepare=data.wiki, stood_in=()),
    _lightning("pytorch/basics/transformer", prepare=data.wiki, stood_in=()),
    _accelerated("nlp_example"),
    _accelerated("by_feature/checkpointing"),
    _taught("sft", "said"),
    _taught("dpo", "preferred"),
    _taught("reward", "preferred"),
    _taught("kto", "preferred"),
    _tuned("miss_finetuning", "--bits bf16 --bf16 true --miss_r 4"),
    _tuned("pissa_finetuning", "--bits fp32 --bf16 false --init_lora_weights pissa --lora_r 4"),
]
PROGRAMS += [
    dataclasses.replace(program, name=f"{program.name}_fsdp", options=(*program.options, "--strategy", "fsdp"))
    for program in PROGRAMS
    if program.is_ours or program.name in ("minGPT", "nanoGPT", "transformer")
]
