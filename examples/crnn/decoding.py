"""From a probability for each column to a text, and how far a text is from the right one."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch


def greedy(log_probs: torch.Tensor) -> list[list[int]]:
    """The best class of each column, repeats and blanks taken out. log_probs: [batch, columns, classes]."""
    texts = []
    for best in log_probs.argmax(dim=-1).tolist():
        texts.append([now for before, now in zip([0, *best], best, strict=False) if now not in (0, before)])
    return texts


def beam_search(log_probs: torch.Tensor, width: int) -> list[list[int]]:
    """The likeliest text of each line over all ways to spell it, by prefix beam search (Hannun et al. 2014), which
    keeps `width` prefixes. log_probs: [batch, columns, classes]."""
    return [_beam_search(columns, width) for columns in log_probs.double().tolist()]


def _beam_search(columns: list[list[float]], width: int) -> list[int]:
    beams = {
        (): (0.0, -math.inf)
    }  # prefix: logarithm of the probability that it ends in a blank, and that it does not
    for column in columns:
        likely = sorted(range(len(column)), key=column.__getitem__, reverse=True)[: width + 1]
        after: defaultdict[tuple[int, ...], tuple[float, float]] = defaultdict(lambda: (-math.inf, -math.inf))
        for prefix, (blank, letter) in beams.items():
            for number in likely:
                here = column[number]
                if number == 0:
                    _add(after, prefix, blank=_plus(blank, letter) + here)
                elif prefix and number == prefix[-1]:
                    _add(after, prefix, letter=letter + here)  # the same letter goes on ...
                    _add(after, (*prefix, number), letter=blank + here)  # ... or comes again after a blank
                else:
                    _add(after, (*prefix, number), letter=_plus(blank, letter) + here)
        beams = dict(sorted(after.items(), key=lambda item: _plus(*item[1]), reverse=True)[:width])
    return list(max(beams, key=lambda prefix: _plus(*beams[prefix])))


def _add(beams: dict, prefix: tuple[int, ...], blank: float = -math.inf, letter: float = -math.inf) -> None:
    before = beams[prefix]
    beams[prefix] = (_plus(before[0], blank), _plus(before[1], letter))


def _plus(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def edit_distance(one: Sequence, other: Sequence) -> int:
    """How many of insert, delete, exchange lead from one to the other (Levenshtein 1966)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def accuracy(read: list[str], right: list[str]) -> tuple[float, float]:
    """By word and by character: 1 less the edit distance, by the length of what is right; at least 0."""
    words = sum(edit_distance(a.split(), b.split()) for a, b in zip(read, right, strict=True))
    characters = sum(edit_distance(a, b) for a, b in zip(read, right, strict=True))
    all_words, all_characters = sum(len(text.split()) for text in right), sum(map(len, right))
    return max(0.0, 1 - words / all_words), max(0.0, 1 - characters / all_characters)
