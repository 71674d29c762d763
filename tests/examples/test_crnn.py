from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.flows.flow import ROOT, Flow

FOLDER = ROOT / "examples/crnn"
sys.path.insert(0, str(FOLDER))  # as `python examples/crnn/train.py` does
from decoding import accuracy, beam_search, edit_distance, greedy  # noqa: E402
from text_lines import Alphabet, render  # noqa: E402
from train import configuration  # noqa: E402

from tools.curve import ROW, picture  # noqa: E402

sys.path.remove(str(FOLDER))


def test_the_curve_is_that_of_the_table() -> None:
    page = (FOLDER / "README.md").read_text()
    assert (ROOT / "docs/crnn.svg").read_text() == picture(page)
    epochs = [float(row[1]) for row in ROW.findall(page)]
    assert epochs[0] < 0.1
    assert epochs[-1] > 0.9


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_it_learns_to_read(flow: Flow) -> None:
    result = flow.python([FOLDER / "train.py"], timeout=1100, env={"OMP_NUM_THREADS": "1"}).ok()
    words, characters = map(float, re.findall(r"beam: words ([\d.]+), characters ([\d.]+)", result.stdout)[0])
    assert words > 0.8
    assert characters > 0.95


def collapse(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for before, n in zip((0, *path), path, strict=False) if n not in (0, before))


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 4))
def test_a_wide_beam_finds_the_likeliest_text_of_all(seed: int, columns: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(1, columns, classes, generator=generator)).double().log_softmax(-1)
    totals: dict[tuple[int, ...], float] = defaultdict(float)
    for path in product(range(classes), repeat=columns):
        totals[collapse(path)] += math.exp(sum(log_probs[0, t, n].item() for t, n in enumerate(path)))
    best = max(totals.values())
    assert totals[tuple(beam_search(log_probs, 2000)[0])] == pytest.approx(best)
    assert greedy(log_probs)[0] == list(collapse(tuple(log_probs[0].argmax(-1).tolist())))


def test_beam_search_adds_up_what_greedy_looks_at_one_by_one() -> None:
    probabilities = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]])  # blank twice: 0.36; the letter somehow: 0.64
    assert greedy(probabilities.log()) == [[]]
    assert beam_search(probabilities.log(), 5) == [[1]]


@given(st.text("abc", max_size=6), st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_is_a_distance(a: str, b: str, c: str) -> None:
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a) <= max(len(a), len(b))
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


def test_accuracy() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert accuracy(["ab cd", "ef"], ["ab cd", "ef"]) == (1, 1)
    assert accuracy(["ab cx", "ef"], ["ab cd", "ef"]) == pytest.approx((2 / 3, 6 / 7))
    assert accuracy([""], ["ab"]) == (0, 0)


def test_lines_are_the_same_for_the_same_seed_and_fit() -> None:
    settings = configuration("", ["text.sizes=[20, 22]"])["text"]  # too large: drawn smaller
    alphabet = Alphabet(settings["characters"])
    one, same, other = (render(settings, alphabet, 20, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, same.tensors, strict=True))
    assert not torch.equal(one.tensors[1], other.tensors[1])
    images, targets, lengths = one.tensors
    assert images.shape == (20, 1, 24, 128)
    assert (images.flatten(1).min(1).values < 0.5).all()  # something is drawn
    assert images[:, :, :, -1].mean() > 0.9  # and nothing is cut off
    texts = [alphabet.decode(row[:length]) for row, length in zip(targets.tolist(), lengths.tolist(), strict=True)]
    assert all(re.fullmatch("[a-z]{2,5}( [a-z]{2,5})?", text) for text in texts)


def test_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("train:\n  epochs: 3\n")
    settings = configuration(str(path), ["train.learning_rate=1", "decode.beam=0"])
    assert (settings["train"]["epochs"], settings["train"]["learning_rate"]) == (3, 1)
    assert settings["train"]["batch_size"] == configuration("", [])["train"]["batch_size"]
    for wrong, says in (
        ("train.epoch=3", "no 'epoch'; there are epochs"),
        ("train.epochs=many", "epochs is 'many', and should be like 8"),
        ("train=3", "train is 3, and should be like"),
        ("train.epochs", "PART.KEY=VALUE is allowed"),
    ):
        with pytest.raises(SystemExit, match=says):
            configuration("", [wrong])
