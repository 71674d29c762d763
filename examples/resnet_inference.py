"""ResNet-50 over many images, on one card or over several, in order.

    python examples/resnet_inference.py --weights resnet50.pth            # one device
    duoka run --devices 0,3 examples/resnet_inference.py                  # GPUs 0 and 3: the same lines
    duoka run --devices 1, examples/resnet_inference.py                   # GPU 1 alone
    duoka predict resnet_inference:make --data photos --read resnet_inference:read --out y.npy    # in examples/

The images are cut from scikit-learn's two sample photographs. --weights is any file of ResNet-50's weights, such as
torchvision's, from whatever card and wrapper it was saved; without it the weights are random, and so are the classes.
"""

import argparse

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import duoka

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])  # of ImageNet


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inside != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """He et al. 2016, with torchvision's names, so that its files fit. depths (3, 4, 6, 3) are ResNet-50."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        inside = 64
        for i, depth in enumerate(depths):
            width = 64 * 2**i
            first = Bottleneck(inside, width, 1 if i == 0 else 2)
            inside = 4 * width
            others = [Bottleneck(inside, width, 1) for _ in range(depth - 1)]
            self.add_module(f"layer{i + 1}", nn.Sequential(first, *others))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def make() -> nn.Module:
    """torchvision's ResNet-50 where there is one, else the same of our own."""
    try:
        from torchvision.models import resnet50
    except ImportError:
        return ResNet()
    return resnet50()


def normalized(pixels: np.ndarray) -> torch.Tensor:
    """[3, height, width] as ResNet wants it, of bytes in [height, width, 3]."""
    return ((torch.tensor(pixels, dtype=torch.float32) / 255 - MEAN) / STD).permute(2, 0, 1)


def read(path: str) -> torch.Tensor:
    """An image file, for `duoka predict --read`."""
    return normalized(np.asarray(Image.open(path).convert("RGB").resize((224, 224))))


def crops(count: int, size: int) -> torch.Tensor:
    """So many squares of the sample photographs, [count, 3, size, size], each from another place."""
    photographs = [normalized(pixels) for pixels in load_sample_images().images]
    generator = torch.Generator().manual_seed(0)
    squares = []
    for i in range(count):
        photograph = photographs[i % len(photographs)]
        top, left = (int(torch.randint(room - size + 1, (), generator=generator)) for room in photograph.shape[1:])
        squares.append(photograph[:, top : top + size, left : left + size])
    return torch.stack(squares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", metavar="PATH", help="a file of ResNet-50's weights")
    parser.add_argument("--limit", type=int, default=32, help="how many images")
    parser.add_argument("--size", type=int, default=224, help="their height and width in pixels")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make()
    if args.weights:
        print(duoka.load_weights(model, args.weights))
    model = model.to(device).eval()
    index = 0
    with torch.no_grad():
        for (images,) in DataLoader(TensorDataset(crops(args.limit, args.size)), batch_size=args.batch_size):
            best = model(images.to(device)).softmax(dim=1).max(dim=1)
            for share, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                print(f"image {index}: class {number}, {share:.4f}")
                index += 1


if __name__ == "__main__":
    main()
