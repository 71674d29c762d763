"""Lines of random words, drawn with real fonts.

Words are random letters: nobody reads them by guessing from a dictionary.
"""

import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import TensorDataset

FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts", "/Library/Fonts")


class Alphabet:
    """Characters and their numbers. 0 is CTC's blank."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._numbers = {character: i for i, character in enumerate(characters, start=1)}

    def __len__(self) -> int:
        return 1 + len(self.characters)

    def encode(self, text: str) -> list[int]:
        return [self._numbers[character] for character in text]

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.characters[number - 1] for number in numbers)


def render(settings: dict[str, Any], alphabet: Alphabet, count: int, seed: int) -> TensorDataset:
    """So many lines: images [count, 1, height, width] from 0 to 1, targets [count, longest] padded with 0, and their
    lengths [count]."""
    chance = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    texts = [_text(settings, alphabet, chance) for _ in range(count)]
    images = torch.stack([torch.from_numpy(_draw(text, settings, chance)) for text in texts])[:, None]
    images = images + settings["noise"] * torch.randn(images.shape, generator=noise)
    longest = (settings["letters"][1] + 1) * settings["words"][1]
    targets = torch.tensor([alphabet.encode(text) + [0] * (longest - len(text)) for text in texts])
    return TensorDataset(images, targets, torch.tensor([len(text) for text in texts]))


def _text(settings: dict[str, Any], alphabet: Alphabet, chance: random.Random) -> str:
    letters = alphabet.characters.replace(" ", "")
    return " ".join(
        "".join(chance.choice(letters) for _ in range(chance.randint(*settings["letters"])))
        for _ in range(chance.randint(*settings["words"]))
    )


def _draw(text: str, settings: dict[str, Any], chance: random.Random) -> np.ndarray:
    """[height, width], 0 to 1. What does not fit into the width is drawn smaller."""
    height, width = settings["height"], settings["width"]
    name, size = chance.choice(_fonts(tuple(settings["fonts"]))), chance.randint(*settings["sizes"])
    font = _font(name, size)
    while font.getlength(text) > width - 8:
        size -= 1
        font = _font(name, size)
    image = Image.new("L", (width, height), 255)
    left = chance.uniform(2, width - font.getlength(text) - 4)
    ImageDraw.Draw(image).text(
        (left, height / 2 + chance.uniform(-1, 1)), text, fill=chance.randint(0, 90), font=font, anchor="lm"
    )
    slant = chance.uniform(-settings["slant"], settings["slant"])
    image = image.transform(
        image.size,
        Image.Transform.AFFINE,
        (1, slant, -slant * height / 2, 0, 1, 0),
        Image.Resampling.BILINEAR,
        fillcolor=255,
    )
    return np.asarray(image, dtype=np.float32) / 255


@cache
def _fonts(names: tuple[str, ...]) -> list[str]:
    """Paths of those fonts that this machine has; "" is Pillow's own."""
    folders = [folder for place in FONT_FOLDERS if (folder := Path(place).expanduser()).is_dir()]
    there = {path.name: str(path) for folder in folders for path in sorted(folder.rglob("*.ttf"))}
    return ["", *(there[name] for name in names if name in there)]


@cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    if path:
        return ImageFont.truetype(path, size)
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        sys.exit("Pillow has no FreeType here: install Pillow from a wheel (pip install --force-reinstall pillow)")
    return font
