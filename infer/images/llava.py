"""Prepares images for LLaVA 1.5, LLaVA 1.6 (LLaVA-NeXT) and LLaVA-OneVision."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from infer.images.opening import RGB
from infer.images.processor import (
    CLIP_MEAN,
    Floats,
    ImageLayout,
    ImageProcessor,
    ProcessorConfig,
    Resampling,
    Size,
    square,
    tiles,
)
from infer.kernels.errors import UnsupportedError
from infer.models.loading.config import RawConfig

_NEXT_SHAPES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_ONEVISION_SHAPES = tuple((384 * rows, 384 * cols) for rows in range(1, 7) for cols in range(1, 7))


@dataclass(frozen=True, eq=False)
class Llava(ImageProcessor):
    """The square in the middle of an image, as large as it goes; with `pads` the whole of it in a
    square of the mean colour."""

    kinds = ("CLIPImageProcessor", "LlavaImageProcessor")

    resampling: Resampling
    shortest: int
    side: int
    patch: int
    more: int  # rows besides those of patches
    pads: tuple[int, int, int] | None
    image_token: str
    marker: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> Llava:
        raw = config.images
        raw.expect("do_center_crop", True)
        token = config.token("image_token", "<image>")
        return cls(
            resampling=Resampling.read(raw),
            shortest=_edge(raw, 224),
            side=square(raw, "crop_size", 224),
            patch=_patch(config),
            more=_more_rows(config),
            pads=_background(raw) if raw.get("do_pad", False, bool) else None,
            image_token=token,
            marker=token,
        )

    def cut(self, height: int, width: int) -> ImageLayout:
        rows = self.side // self.patch
        tokens = rows * rows + self.more
        return ImageLayout(
            size=(height, width),
            resized=(self.side, self.side),
            tiles=(0, 0),
            grids=((rows, rows),),
            tokens=tokens,
            prompt=self.image_token * tokens,
        )

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        if self.pads is not None:
            image = padded(image, (max(layout.size),) * 2, self.pads)
        height, width = image.shape[:2]
        if height < width:
            size = self.shortest, int(self.shortest * width / height)
        else:
            size = int(self.shortest * height / width), self.shortest
        return self.resampling.pictures([cropped(self.resampling.resize(image, size), self.side)])


class Tiled(ImageProcessor):
    """The whole of an image in a square, and behind it tiles of the image on a black canvas of the
    shape that suits it best. Of the rows of the tiles' patches, those of the canvas's margins are
    left out, and each line ends with one that is learned (image_newline)."""

    resampling: Resampling
    side: int
    shapes: tuple[Size, ...]
    splits = True

    @property
    @abstractmethod
    def grid(self) -> int:
        """Rows of patches of a tile, and as many columns."""

    @abstractmethod
    def tokens(self, lines: int, columns: int) -> int:
        """Rows of the text model's input, of an image with so many lines and columns of patches
        within the margins."""

    def cut(self, height: int, width: int) -> ImageLayout:
        shape = best_shape(height, width, self.shapes)
        rows, columns = (shape[0] // self.side, shape[1] // self.side) if self.splits else (0, 0)
        grid = self.grid
        inner = within_margins((height, width), (grid * rows, grid * columns))
        tokens = self.tokens(*inner)
        return ImageLayout(
            size=(height, width),
            resized=(self.side, self.side),
            tiles=(rows, columns),
            grids=((grid, grid),) * (rows * columns + 1),
            tokens=tokens,
            prompt=self.image_token * tokens,
        )

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        resize, size = self.resampling.resize, (self.side, self.side)
        (height, width), (rows, columns) = layout.size, layout.tiles
        canvas = rows * self.side, columns * self.side
        down, across = canvas[0] / height, canvas[1] / width
        if across < down:
            fitted = min(math.ceil(height * across), canvas[0]), canvas[1]
        else:
            fitted = canvas[0], min(math.ceil(width * down), canvas[1])
        parts = tiles(padded(resize(image, fitted), canvas, (0, 0, 0)), size)
        return self.resampling.pictures([resize(image, size), *parts])


@dataclass(frozen=True, eq=False)
class LlavaNext(Tiled):
    """LLaVA 1.6."""

    kinds = ("LlavaNextImageProcessor",)

    resampling: Resampling
    side: int
    shapes: tuple[Size, ...]
    patch: int
    more: int
    image_token: str
    marker: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> LlavaNext:
        raw = config.images
        raw.expect("do_center_crop", True)
        side = square(raw, "crop_size", 224)
        if _edge(raw, 224) != side:
            raise UnsupportedError(f"{raw.place}: size and crop_size must be the same.")
        token = config.token("image_token", "<image>")
        return cls(
            resampling=Resampling.read(raw),
            side=side,
            shapes=_shapes(raw, _NEXT_SHAPES, side),
            patch=_patch(config),
            more=_more_rows(config),
            image_token=token,
            marker=token,
        )

    @property
    def grid(self) -> int:
        return self.side // self.patch

    def tokens(self, lines: int, columns: int) -> int:
        return self.grid**2 + self.more + lines * (columns + 1)


@dataclass(frozen=True, eq=False)
class LlavaOnevision(Tiled):
    """LLaVA-OneVision. Of many tiles the patches are scaled down to as many as `most` tiles have.
    Where a prompt has several images, each is one picture, in a square of the mean colour."""

    kinds = ("LlavaOnevisionImageProcessor",)

    resampling: Resampling
    side: int
    shapes: tuple[Size, ...]
    picture_tokens: int
    less: int
    most: int
    background: tuple[int, int, int]
    image_token: str
    marker: str
    splits: bool = True

    @classmethod
    def read(cls, config: ProcessorConfig) -> LlavaOnevision:
        raw = config.images
        raw.expect("do_center_crop", False)
        side = square(raw, "size", 384)
        token = config.token("image_token", "<image>")
        vision = config.model.section("vision_config")
        rows = side // square(vision, "patch_size", 14)
        return cls(
            resampling=Resampling.read(raw),
            side=side,
            shapes=_shapes(raw, _ONEVISION_SHAPES, side),
            picture_tokens=config.prompts.size("num_image_tokens", rows * rows),
            less=int(_strategy(config, "full") == "default"),
            most=_most_tiles(config),
            background=_background(raw),
            image_token=token,
            marker=token,
        )

    @property
    def grid(self) -> int:
        return math.isqrt(self.picture_tokens)

    def tokens(self, lines: int, columns: int) -> int:
        if not self.splits:
            return self.picture_tokens + 1 - self.less
        scale = math.sqrt(lines * columns / (self.most * self.grid**2))
        if scale > 1.1:
            lines, columns = int(lines // scale), int(columns // scale)
        return self.picture_tokens + lines * (columns + 1) - self.less

    def among(self, count: int) -> LlavaOnevision:
        return replace(self, splits=count < 2)

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        if self.splits:
            return super().pixels(image, layout)
        whole = padded(image, (max(layout.size),) * 2, self.background)
        return self.resampling.pictures([self.resampling.resize(whole, layout.resized)])


def best_shape(height: int, width: int, shapes: tuple[Size, ...]) -> Size:
    """Returns the shape in which most of an image's pixels are kept, and then the one with the
    smallest margins (select_best_resolution)."""
    best, most_kept, least_lost = shapes[0], 0, math.inf
    for shape in shapes:
        scale = min(shape[1] / width, shape[0] / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        lost = shape[0] * shape[1] - kept
        if kept > most_kept or (kept == most_kept and lost < least_lost):
            best, most_kept, least_lost = shape, kept, lost
    return best


def within_margins(size: Size, canvas: Size) -> Size:
    """Returns the rows and columns that an image takes in the middle of a canvas (unpad_image)."""
    (height, width), (rows, columns) = size, canvas
    if not rows:
        return 0, 0
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


def padded(image: RGB, canvas: Size, colour: tuple[int, int, int]) -> RGB:
    """An image in the middle of a canvas of one colour."""
    if image.shape[:2] == canvas:
        return image
    result = np.empty((*canvas, 3), np.uint8)
    result[:] = colour
    top, left = (canvas[0] - image.shape[0]) // 2, (canvas[1] - image.shape[1]) // 2
    result[top : top + image.shape[0], left : left + image.shape[1]] = image
    return result


def cropped(image: RGB, side: int) -> RGB:
    """The square in the middle of an image, with black around it where the image is smaller."""
    height, width = image.shape[:2]
    if height < side or width < side:
        larger = max(height, side), max(width, side)
        result = np.zeros((*larger, 3), np.uint8)
        top, left = -((height - larger[0]) // 2), -((width - larger[1]) // 2)
        result[top : top + height, left : left + width] = image
        image = result
        top, left = (height - side) // 2 + top, (width - side) // 2 + left
    else:
        top, left = (height - side) // 2, (width - side) // 2
    return image[top : top + side, left : left + side]


def _edge(raw: RawConfig, default: int) -> int:
    """The shortest edge of an image, of `size`."""
    if isinstance(raw.values.get("size"), dict) and "shortest_edge" in raw.values["size"]:
        return raw.section("size").size("shortest_edge")
    return square(raw, "size", default)


def _shapes(raw: RawConfig, default: tuple[Size, ...], side: int) -> tuple[Size, ...]:
    """The shapes of canvases, (height, width), all of them multiples of a tile."""
    found = raw.items("image_grid_pinpoints", None, kind=list)
    shapes = default if found is None else [tuple(shape) for shape in found]
    for shape in shapes:
        whole = len(shape) == 2 and all(type(edge) is int and edge > 0 for edge in shape)
        if not whole or shape[0] % side or shape[1] % side or max(shape) > 100 * side:
            raise UnsupportedError(
                f"{raw.place}: image_grid_pinpoints has {list(shape)}, which is no number of tiles "
                f"of {side} pixels."
            )
    if not shapes:
        raise UnsupportedError(f"{raw.place}: image_grid_pinpoints is empty.")
    return tuple((height, width) for height, width in shapes)


def _patch(config: ProcessorConfig) -> int:
    patch = config.prompts.size("patch_size", 14)
    return square(config.model.section("vision_config"), "patch_size", patch)


def _strategy(config: ProcessorConfig, default: str) -> str:
    """Which of the encoder's rows are kept: without the first (default), or all (full)."""
    key = "vision_feature_select_strategy"
    config.model.expect(key, default, "default", "full")
    strategy = config.model.get(key, default, str)
    config.prompts.expect(key, strategy)
    return str(strategy)


def _more_rows(config: ProcessorConfig) -> int:
    """Rows of the encoder besides those of patches: of CLIP one in front, if that is kept."""
    kind = config.model.section("vision_config").get("model_type", "clip_vision_model", str)
    more = config.prompts.size(
        "num_additional_image_tokens", int(kind == "clip_vision_model"), least=0
    )
    return more - int(_strategy(config, "default") == "default")


def _most_tiles(config: ProcessorConfig) -> int:
    aspect = config.model.get("vision_aspect_ratio", "anyres_max_9", str)
    number = aspect.removeprefix("anyres_max_")
    if not number.isdecimal() or not 0 < int(number) <= 1000:
        raise UnsupportedError(
            f"{config.model.place}: vision_aspect_ratio {aspect!r} is not implemented."
        )
    return int(number)


def _background(raw: RawConfig) -> tuple[int, int, int]:
    """The mean colour."""
    red, green, blue = (int(mean * 255) for mean in raw.items("image_mean", CLIP_MEAN, kind=float))
    return red, green, blue
