"""Prepares images for LFM2-VL and LFM2.5-VL."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from infer.images.opening import RGB
from infer.images.processor import (
    BILINEAR,
    HALF,
    Floats,
    ImageLayout,
    ImageProcessor,
    ProcessorConfig,
    Resampling,
    Size,
    patches,
    tiles,
)
from infer.images.tiling import best_tiles
from infer.kernels.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class Lfm2VL(ImageProcessor):
    """An image of any shape with a number of tokens within bounds; of a large one tiles of one
    size, and behind them the whole. Patches come row by row, without the padding that transformers
    adds."""

    kinds = ("Lfm2VlImageProcessor",)

    resampling: Resampling
    patch: int
    merge: int
    tile: int
    least_tiles: int
    most_tiles: int
    thumbnail: bool
    least_tokens: int
    most_tokens: int
    tolerance: float
    marked: bool
    image_token: str
    marker: str
    begin: str
    end: str
    whole: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> Lfm2VL:
        raw = config.images
        splits = raw.get("do_image_splitting", True, bool)
        token = config.token("image_token", "<image>")
        made = cls(
            # Published files say do_resize false, and transformers resizes all the same.
            resampling=Resampling.read(raw.with_values(do_resize=True), BILINEAR, HALF, HALF),
            patch=raw.size("encoder_patch_size", 16),
            merge=raw.size("downsample_factor", 2),
            tile=raw.size("tile_size", 512),
            least_tiles=raw.size("min_tiles", 2) if splits else 1,
            most_tiles=raw.size("max_tiles", 10) if splits else 1,
            thumbnail=raw.get("use_thumbnail", True, bool),
            least_tokens=raw.size("min_image_tokens", 64),
            most_tokens=raw.size("max_image_tokens", 256),
            tolerance=raw.factor("max_pixels_tolerance", 2.0),
            marked=config.prompts.get("use_image_special_tokens", True, bool),
            image_token=token,
            marker=token,
            begin=config.token("image_start_token", "<|image_start|>"),
            end=config.token("image_end_token", "<|image_end|>"),
            whole=config.token("image_thumbnail_token", "<|img_thumbnail|>"),
        )
        if made.least_tiles > made.most_tiles or made.tile % (made.patch * made.merge):
            raise UnsupportedError(
                f"{raw.place}: tiles of {made.tile} pixels, {made.least_tiles} to "
                f"{made.most_tiles} of them, cannot be cut."
            )
        return made

    def cut(self, height: int, width: int) -> ImageLayout:
        resized = self._resized(height, width)
        side = self.patch * self.merge
        rows, columns = self._tiles(height, width)
        cut = rows * columns
        grids = [(self.tile // self.patch, self.tile // self.patch)] * cut
        if not cut or self.thumbnail:
            grids.append((resized[0] // self.patch, resized[1] // self.patch))
        text = self.image_token * ((self.tile // side) ** 2)
        parts = [
            (f"<|img_row_{row + 1}_col_{column + 1}|>" if self.marked else "") + text
            for row in range(rows)
            for column in range(columns)
        ]
        if not cut or self.thumbnail:
            parts.append(self.whole if self.marked and cut else "")
            parts.append(self.image_token * (resized[0] // side * (resized[1] // side)))
        prompt = "".join(parts)
        return ImageLayout(
            size=(height, width),
            resized=resized,
            tiles=(rows, columns),
            grids=tuple(grids),
            tokens=sum(rows * columns for rows, columns in grids) // self.merge**2,
            prompt=f"{self.begin}{prompt}{self.end}" if self.marked else prompt,
        )

    def _resized(self, height: int, width: int) -> Size:
        """The nearest multiples of a token's side, with the number of tokens within bounds."""
        side = self.patch * self.merge
        least, most = self.least_tokens * side * side, self.most_tokens * side * side
        rows, columns = max(1, round(height / side)), max(1, round(width / side))
        if rows * columns > self.most_tokens:
            scale = math.sqrt((height * width) / most)
            rows = max(1, math.floor(height / scale / side))
            columns = max(1, math.floor(width / scale / side))
        elif rows * columns < self.least_tokens:
            scale = math.sqrt(least / (height * width))
            rows, columns = math.ceil(height * scale / side), math.ceil(width * scale / side)
        return rows * side, columns * side

    def _tiles(self, height: int, width: int) -> Size:
        """Rows and columns of tiles; (0, 0) of an image that is not cut."""
        side = self.patch * self.merge
        area = 1
        for edge in (height, width):
            area *= max(self.patch, round(edge / side) * side)
        large = area > self.most_tokens * side * side * self.tolerance
        if not large or self.most_tiles == 1:
            return 0, 0
        best = best_tiles(height, width, (self.tile, self.tile), self.least_tiles, self.most_tiles)
        return (0, 0) if best == (1, 1) else best  # one tile is not cut

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        rows, columns = layout.tiles
        pictures = []
        if rows:
            size = (rows * self.tile, columns * self.tile)
            pictures = tiles(self.resampling.resize(image, size), (self.tile, self.tile))
        if len(pictures) < len(layout.grids):
            pictures.append(self.resampling.resize(image, layout.resized))
        return np.concatenate(
            [patches(self.resampling.numbers(picture), self.patch) for picture in pictures]
        )
