"""The base of all image processors, which turn the pixels of an image into what an encoder takes.

Each family of models is a subclass of `ImageProcessor`, in a file of its own, which does what the
processor of transformers does that preprocessor_config.json names: the numbers of its Pillow
backend with a Pillow before 13, bit for bit. Since 13 Pillow may scale the height before the width,
which changes values by as much as 25 of 255 in noise; here the width comes first whatever Pillow
there is, as in torchvision. transformers' torchvision backend, which it takes where torchvision is
installed, differs by 1 or 2 of 255 in one value of a hundred (Lanczos: of thirty). It subtracts the
mean and divides in one step, too, which rounds the last bit otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from infer.images.opening import RGB, pillow
from infer.kernels.errors import RequestError, UnsupportedError
from infer.models.loading.config import RawConfig, shown

Floats = NDArray[np.float32]
Size = tuple[int, int]  # (height, width), in pixels, patches or tiles
Means = tuple[float, float, float]

CLIP_MEAN: Means = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Means = (0.26862954, 0.26130258, 0.27577711)
HALF: Means = (0.5, 0.5, 0.5)

_MOST_ASPECT = 200  # as transformers has it for Qwen's models; others would scale up without end

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # as Pillow numbers its filters


@dataclass(frozen=True)
class ImageLayout:
    """The layout of an image: how it is cut, and what it takes of a prompt. The image's size alone
    decides it.

    size: of the image, (height, width)
    resized: the whole of it as the encoder sees it, which may be the thumbnail beside tiles
    tiles: rows and columns of tiles, (0, 0) where the image is not cut
    grids: rows and columns of patches, for each picture that the encoder takes
    tokens: rows of the text model's input, of all pictures together
    prompt: the text that stands in a prompt for the image; it has the image token `tokens` times
    """

    size: Size
    resized: Size
    tiles: Size
    grids: tuple[Size, ...]
    tokens: int
    prompt: str


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as an encoder takes it. pixels: float32, patches [patches, values of a patch], one
    picture behind the other, or pictures [pictures, 3, height, width]."""

    pixels: Floats
    layout: ImageLayout


@dataclass(frozen=True)
class ProcessorConfig:
    """The files of a model that say how its images are processed.

    images: preprocessor_config.json, or what processor_config.json has of it
    prompts: processor_config.json
    model: config.json
    tokens: names of special tokens in tokenizer_config.json, such as image_token, and their texts
    """

    images: RawConfig
    prompts: RawConfig
    model: RawConfig
    tokens: Mapping[str, str]

    def token(self, name: str, default: str) -> str:
        """The text of a special token."""
        text: str = self.prompts.get(name, default, str)
        return self.tokens.get(name, text)


class ImageProcessor(ABC):
    """Turns images into what the encoder of one model takes.

    kinds: names of transformers' classes that compute the same
    marker: what a chat template writes for an image, in place of which `ImageLayout.prompt` comes
    image_token: the token whose embeddings the encoder's rows replace
    """

    kinds: ClassVar[tuple[str, ...]]
    marker: str
    image_token: str

    @classmethod
    @abstractmethod
    def read(cls, config: ProcessorConfig) -> ImageProcessor:
        """Returns the processor that the files of a model describe. Raises UnsupportedError for
        values that are not implemented."""

    def layout(self, height: int, width: int) -> ImageLayout:
        """Returns the layout of an image of this height and width. Raises RequestError if one side
        is more than 200 times the other."""
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise RequestError(
                f"An image of {width:,} x {height:,} pixels is too narrow: sides of 1 to "
                f"{_MOST_ASPECT} at most are taken. Cut it into parts."
            )
        return self.cut(height, width)

    @abstractmethod
    def cut(self, height: int, width: int) -> ImageLayout:
        """Returns the layout of an image of this height and width, which is not too narrow."""

    @abstractmethod
    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        """Returns the pixels of an image, uint8 [height, width, 3], of this layout."""

    def among(self, count: int) -> ImageProcessor:
        """Returns the processor for each image of a prompt that has this many."""
        return self

    def __call__(self, image: RGB) -> ProcessedImage:
        """Returns an image, uint8 [height, width, 3], as the encoder takes it. Raises RequestError
        if one side is more than 200 times the other."""
        height, width, _ = image.shape
        layout = self.layout(height, width)
        return ProcessedImage(self.pixels(image, layout), layout)


@dataclass(frozen=True, eq=False)
class Resampling:
    """Resizing by a filter of Pillow's, and colours as the encoder's numbers. table: float32
    [256, 3], for each value of each colour the number."""

    filter: int
    table: Floats

    @classmethod
    def read(
        cls,
        raw: RawConfig,
        filter: int = BICUBIC,
        mean: Means = CLIP_MEAN,
        std: Means = CLIP_STD,
        normalize: bool = True,
    ) -> Resampling:
        """The filter, and (x * rescale_factor - image_mean) / image_std, of a
        preprocessor_config.json, with the defaults of transformers' class."""
        raw.expect("do_resize", True)
        raw.expect("resample", filter, *range(6))
        levels = np.arange(256, dtype=np.float64)
        if raw.get("do_rescale", True, bool):
            levels = levels * raw.factor("rescale_factor", 1 / 255)
        table: Floats = np.repeat(levels.astype(np.float32)[:, None], 3, axis=1)
        if raw.get("do_normalize", normalize, bool):
            means = raw.items("image_mean", mean, kind=float)
            if len(means) != 3:
                raise UnsupportedError(
                    f"{raw.place}: image_mean must be 3 numbers, not {shown(means)}."
                )
            deviations = raw.factors("image_std", 3, std)
            table -= np.array(means, np.float32)
            table /= np.array(deviations, np.float32)
        return cls(raw.size("resample", filter, least=0), table)

    def resize(self, image: RGB, size: Size) -> RGB:
        """An image of this (height, width)."""
        if image.shape[:2] == size:
            return image
        module, (height, width) = pillow(), size
        made = module.fromarray(np.ascontiguousarray(image))
        # The width first, by itself: in one call the order is Pillow's choice.
        made = made.resize((width, image.shape[0]), resample=self.filter)
        return np.asarray(made.resize((width, height), resample=self.filter))

    def numbers(self, pixels: RGB) -> Floats:
        """The encoder's numbers for colours, float32 of the same shape [.., 3]."""
        numbers = np.empty(pixels.shape, np.float32)
        for colour in range(3):
            numbers[..., colour] = self.table[:, colour][pixels[..., colour]]
        return numbers

    def pictures(self, pictures: list[RGB]) -> Floats:
        """Pictures of one size as [pictures, 3, height, width]."""
        return np.ascontiguousarray(self.numbers(np.stack(pictures)).transpose(0, 3, 1, 2))


def patches(image: NDArray[Any], patch: int) -> NDArray[Any]:
    """Square patches of an image [height, width, 3], whose sides are multiples of theirs: [rows *
    columns, patch * patch * 3], row by row, colours last."""
    height, width, _ = image.shape
    cut = image.reshape(height // patch, patch, width // patch, patch, 3)
    return cut.transpose(0, 2, 1, 3, 4).reshape(-1, patch * patch * 3)


def tiles(image: RGB, size: Size) -> list[RGB]:
    """Tiles of this (height, width), row by row, of an image whose sides are multiples of it."""
    (height, width), (rows, columns) = size, (image.shape[0] // size[0], image.shape[1] // size[1])
    return [
        image[row * height : (row + 1) * height, column * width : (column + 1) * width]
        for row in range(rows)
        for column in range(columns)
    ]


def longest_edge(raw: RawConfig, key: str, default: int) -> int:
    """The longest edge of the size under a key, which may not be said otherwise."""
    size = raw.section(key)
    return size.size("longest_edge") if size.values else default


def square(raw: RawConfig, key: str, default: int) -> int:
    """The side of a square: a number, a list of two, or an object of height and width."""
    value = raw.values.get(key)
    if isinstance(value, dict):
        section = raw.section(key)
        side = section.size("height")
        section.expect("width", side)
        return side
    if isinstance(value, list):
        sides = raw.items(key, kind=int)
        if len(sides) != 2 or sides[0] != sides[1]:
            raise UnsupportedError(f"{raw.place}: {key} must be a square, not {shown(sides)}.")
        return raw.with_values(**{key: sides[0]}).size(key)
    return raw.size(key, default)
