"""What the programs train on, and the models they start from, made small: one function for each kind of data.

Each takes the folder where the program runs, and writes what the program would download into it or beside it.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TEXT = 40_000  # characters
WORDS = [f"w{number}" for number in range(40)]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}  # transformers


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


def graphs(folder: Path) -> None:
    """What torch_geometric reads for some of the TU data sets: small graphs, a class for each."""
    for place in ("TU/MUTAG", "PROTEINS/PROTEINS", "PROTEINS_dense/PROTEINS", "TUD/PROTEINS_full"):
        raw = folder.parent / "data" / place / "raw"
        if not raw.exists():
            raw.mkdir(parents=True)
            _graphs(raw / place.rpartition("/")[2])


def _graphs(file: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(6, 16, 120)
    starts = np.cumsum(sizes) - sizes
    pairs: set[tuple[int, int]] = set()
    for start, size in zip(starts, sizes, strict=True):
        for one, other in rng.integers(0, size, (2 * size, 2)) + start + 1:
            pairs |= {(one, other), (other, one)} if one != other else set()
    nodes = int(sizes.sum())
    lines = {
        "A": sorted(pairs),
        "graph_indicator": [[number + 1] for number, size in enumerate(sizes) for _ in range(size)],
        "graph_labels": [[label] for label in np.resize([0, 1], len(sizes))],
        "node_labels": rng.integers(0, 3, (nodes, 1)).tolist(),
        "node_attributes": rng.normal(size=(nodes, 4)).round(3).tolist(),
    }
    for part, rows in lines.items():
        text = "\n".join(", ".join(map(str, row)) for row in rows)
        file.with_name(f"{file.name}_{part}.txt").write_text(text + "\n")


def proteins(folder: Path) -> None:
    """What torch_geometric reads for PPI: graphs whose nodes have 50 features and 121 labels, several at once."""
    rng = np.random.default_rng(0)
    for place in (folder.parent / "data", folder / "data"):
        raw = place / "PPI" / "raw"
        raw.mkdir(parents=True)
        for split, graphs in (("train", 6), ("valid", 2), ("test", 2)):
            ids = np.repeat(np.arange(graphs), 30) + 1
            ends = rng.integers(0, 30, (graphs * 90, 2)) + np.repeat(np.arange(graphs) * 30, 90)[:, None]
            links = [{"source": int(one), "target": int(other)} for one, other in ends]
            nodes = [{"id": node} for node in range(len(ids))]
            parts = {"directed": True, "multigraph": False, "graph": {}, "nodes": nodes, "links": links}
            (raw / f"{split}_graph.json").write_text(json.dumps(parts))
            np.save(raw / f"{split}_feats.npy", rng.normal(size=(len(ids), 50)))
            np.save(raw / f"{split}_labels.npy", rng.integers(0, 2, (len(ids), 121)))
            np.save(raw / f"{split}_graph_id.npy", ids)


def ratings(folder: Path) -> None:
    """What torch_geometric reads for BitcoinOTC: who trusts whom, and how much."""
    raw = folder.parent / "data" / "BitcoinOTC-1" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    ends = rng.integers(1, 80, (1200, 2))
    times = 1.3e9 + np.sort(rng.integers(0, 10**8, 1200))
    lines = (
        f"{a},{b},{trust},{time}" for (a, b), trust, time in zip(ends, rng.integers(-9, 10, 1200), times, strict=True)
    )
    (raw / "soc-sign-bitcoinotc.csv").write_text("\n".join(lines))


def molecules(folder: Path) -> None:
    """What torch_geometric reads for ZINC: small graphs with kinds of atoms and bonds, a number for each."""
    import torch

    raw = folder.parent / "data" / "ZINC" / "raw"
    raw.mkdir(parents=True)
    random = torch.Generator().manual_seed(0)
    sizes = {"train": 200, "val": 60, "test": 60}
    for split, size in sizes.items():
        made = []
        for _ in range(size):
            atoms = int(torch.randint(8, 14, (), generator=random))
            bonds = torch.randint(0, 4, (atoms, atoms), generator=random).clamp(min=1) - 1
            kinds = torch.randint(0, 20, (atoms,), generator=random)
            made.append({"atom_type": kinds, "bond_type": bonds, "logP_SA_cycle_normalized": kinds.float().mean()})
        (raw / f"{split}.pickle").write_bytes(pickle.dumps(made))
        (raw / f"{split}.index").write_text(",".join(map(str, range(size))))


def _sentence(rng: random.Random, least: int = 4, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def _rows(folder: Path, name: str, sizes: dict[str, int], row: Callable[[random.Random], dict[str, Any]]) -> None:
    """A data set of Hugging Face's: a file of JSON lines for each split."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split, size in sizes.items():
        lines = (json.dumps({"idx": number, **row(rng)}) for number in range(size))
        (folder / name / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def glue(folder: Path) -> None:
    """GLUE's MRPC, pairs of sentences that say the same or not, and a small BERT by the names that are asked for."""
    from transformers import BertConfig, BertForSequenceClassification

    def pair(rng: random.Random) -> dict[str, Any]:
        one = _sentence(rng)
        same = rng.random() < 0.5
        other = " ".join(reversed(one.split())) if same else _sentence(rng)
        return {"sentence1": one, "sentence2": other, "label": int(same)}

    _rows(folder, "nyu-mll/glue", {"train": 150, "validation": 70, "test": 20}, pair)
    files = "".join(f"    - split: {split}\n      path: {split}.jsonl\n" for split in ("train", "validation", "test"))
    (folder / "nyu-mll/glue/README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    model = folder / "bert-base-cased"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    config = BertConfig(
        vocab_size=len(vocabulary),
        max_position_embeddings=64,
        **SMALL,
    )
    _save(BertForSequenceClassification, config, model)
    (model / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    chosen = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 64}
    (model / "tokenizer_config.json").write_text(json.dumps(chosen))


def _save(kind: Any, config: Any, folder: Path) -> None:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)


def _llama(folder: Path, name: str) -> None:
    """A small Llama with a tokenizer of words and a template for chats."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate([*special, "user", "assistant", ":", "###", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder / name)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        **SMALL,
    )
    _save(LlamaForCausalLM, config, folder / name)


def chats(folder: Path) -> None:
    """Conversations, preferences, and a small Llama, all in folders of the program's."""

    def message(role: str, rng: random.Random) -> list[dict[str, str]]:
        return [{"role": role, "content": _sentence(rng)}]

    sizes = {"train": 60, "test": 16}
    _llama(folder, "llama")
    _rows(folder, "said", sizes, lambda rng: {"messages": message("user", rng) + message("assistant", rng)})
    _rows(
        folder,
        "preferred",
        sizes,
        lambda rng: {
            "prompt": message("user", rng),
            "chosen": message("assistant", rng),
            "rejected": message("assistant", rng),
        },
    )


def answers(folder: Path) -> None:
    """Questions with answers, and a small Llama."""
    _llama(folder, "llama")
    _rows(folder, "spoken", {"train": 60}, lambda rng: {"query": _sentence(rng), "response": _sentence(rng)})


def wiki(folder: Path) -> None:
    """The text that Lightning's language models read, where its demo module looks for it."""
    rng = random.Random(0)
    (folder / "data").mkdir()
    lines = (_sentence(rng, 10, 20) for _ in range(12_000))
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")
