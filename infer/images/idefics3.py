"""Prepares images for Idefics3 and SmolVLM."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infer.images.opening import RGB
from infer.images.processor import (
    HALF,
    LANCZOS,
    Floats,
    ImageLayout,
    ImageProcessor,
    ProcessorConfig,
    Resampling,
    Size,
    longest_edge,
    tiles,
)

_LONGEST = 4096  # of any image, whatever the config says


@dataclass(frozen=True, eq=False)
class Idefics3(ImageProcessor):
    """Square tiles of an image, and behind them the whole of it in one more."""

    kinds = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")

    resampling: Resampling
    longest: int
    side: int
    splits: bool
    patch: int
    tile_tokens: int
    image_token: str
    marker: str
    around: str
    whole: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> Idefics3:
        raw, vision = config.images, config.model.section("vision_config")
        side = longest_edge(raw, "max_image_size", 364)
        patch = vision.size("patch_size", 32)
        scale = config.model.size("scale_factor", 2)
        token = config.token("image_token", "<image>")
        return cls(
            resampling=Resampling.read(raw, LANCZOS, HALF, HALF),
            longest=longest_edge(raw, "size", 4 * 364),
            side=side,
            splits=raw.get("do_image_splitting", True, bool),
            patch=patch,
            tile_tokens=config.prompts.size("image_seq_len", (side // patch // scale) ** 2),
            image_token=token,
            marker=token,
            around=config.token("fake_image_token", "<fake_token_around_image>"),
            whole=config.token("global_image_token", "<global-img>"),
        )

    def cut(self, height: int, width: int) -> ImageLayout:
        rows, columns = self._tiles(*self._scaled(height, width)) if self.splits else (0, 0)
        pictures = rows * columns + 1
        grid = self.side // self.patch
        return ImageLayout(
            size=(height, width),
            resized=(self.side, self.side),
            tiles=(rows, columns),
            grids=((grid, grid),) * pictures,
            tokens=pictures * self.tile_tokens,
            prompt=self._prompt(rows, columns),
        )

    def _scaled(self, height: int, width: int) -> Size:
        """The size of an image whose longest edge is `longest`; the other is even."""
        height, width = _fitted(height, width, self.longest, even=True)
        if max(height, width) > _LONGEST:
            height, width = _fitted(height, width, _LONGEST, even=False)
        return max(height, 1), max(width, 1)

    def _tiles(self, height: int, width: int) -> Size:
        """Rows and columns of tiles that cover a size; (0, 0) where one does."""
        rows, columns = self._covering(height, width)
        return (0, 0) if rows == columns == 1 else (rows, columns)

    def _covering(self, height: int, width: int) -> Size:
        aspect, side = width / height, self.side
        if width >= height:
            columns = math.ceil(width / side)
            return math.ceil(int(columns * side / aspect) / side), columns
        rows = math.ceil(height / side)
        return rows, math.ceil(int(rows * side * aspect) / side)

    def _prompt(self, rows: int, columns: int) -> str:
        tile = self.image_token * self.tile_tokens
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{self.around}<row_{row}_col_{column}>{tile}"
            text += "\n"
        text += "\n" if rows else ""
        return f"{text}{self.around}{self.whole}{tile}{self.around}"

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        resize, side = self.resampling.resize, (self.side, self.side)
        image = resize(image, self._scaled(*layout.size))
        if not self.splits:
            return self.resampling.pictures([resize(image, side)])
        rows, columns = self._covering(image.shape[0], image.shape[1])
        image = resize(image, (rows * self.side, columns * self.side))
        # The whole is made of the image as it was resized for the tiles, not of the original.
        cut = tiles(image, side) if layout.tiles != (0, 0) else []
        return self.resampling.pictures([*cut, resize(image, side)])


def _fitted(height: int, width: int, longest: int, even: bool) -> Size:
    """The size of an image with its longest edge this long."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        return max(height + (height % 2 if even else 0), 1), width
    height, width = longest, int(longest * aspect)
    return height, max(width + (width % 2 if even else 0), 1)
