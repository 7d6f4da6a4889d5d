"""Prepares images for Gemma 3 and Gemma 4."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from infer.images.opening import RGB
from infer.images.processor import (
    BICUBIC,
    BILINEAR,
    HALF,
    Floats,
    ImageLayout,
    ImageProcessor,
    ProcessorConfig,
    Resampling,
    Size,
    patches,
    square,
)

_BUDGETS = (280, 70, 140, 560, 1120)  # of tokens; the first is the default


@dataclass(frozen=True, eq=False)
class Gemma3(ImageProcessor):
    """A picture of one size, into which the whole image is squeezed."""

    kinds = ("Gemma3ImageProcessor",)

    resampling: Resampling
    side: int
    patch: int
    tokens: int
    image_token: str
    marker: str
    end: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> Gemma3:
        raw = config.images
        raw.expect("do_pan_and_scan", False)
        tokens = config.prompts.size("image_seq_length", 256)
        return cls(
            resampling=Resampling.read(raw, BILINEAR, HALF, HALF),
            side=square(raw, "size", 224),
            patch=config.model.section("vision_config").size("patch_size", 16),
            tokens=config.model.size("mm_tokens_per_image", tokens),
            image_token=config.token("image_token", "<image_soft_token>"),
            marker=config.token("boi_token", "<start_of_image>"),
            end=config.token("eoi_token", "<end_of_image>"),
        )

    def cut(self, height: int, width: int) -> ImageLayout:
        rows = self.side // self.patch
        return ImageLayout(
            size=(height, width),
            resized=(self.side, self.side),
            tiles=(0, 0),
            grids=((rows, rows),),
            tokens=self.tokens,
            prompt=f"\n\n{self.marker}{self.image_token * self.tokens}{self.end}\n\n",
        )

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        return self.resampling.pictures([self.resampling.resize(image, layout.resized)])


@dataclass(frozen=True, eq=False)
class Gemma4(ImageProcessor):
    """An image of any shape, as large as a budget of tokens allows. A token is pool x pool patches:
    of gemma4, whose encoder pools its results, the patches are given, row by row; of
    gemma4_unified (merged), which has no encoder, a token's pixels."""

    kinds = ("Gemma4ImageProcessor", "Gemma4UnifiedImageProcessor")

    resampling: Resampling
    patch: int
    pool: int
    budget: int
    merged: bool
    image_token: str
    marker: str
    begin: str
    end: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> Gemma4:
        raw = config.images
        raw.expect("max_soft_tokens", *_BUDGETS)
        token = config.token("image_token", "<|image|>")
        return cls(
            resampling=Resampling.read(raw, BICUBIC, (0, 0, 0), (1, 1, 1), normalize=False),
            patch=raw.size("patch_size", 16),
            pool=raw.size("pooling_kernel_size", 3),
            budget=raw.size("max_soft_tokens", _BUDGETS[0]),
            merged=config.model.get("model_type", "", str) == "gemma4_unified",
            image_token=token,
            marker=token,
            begin=config.token("boi_token", "<|image>"),
            end=config.token("eoi_token", "<image|>"),
        )

    def cut(self, height: int, width: int) -> ImageLayout:
        rows, columns = self._tokens(height, width)
        parts = 1 if self.merged else self.pool
        side = self.patch * self.pool
        return ImageLayout(
            size=(height, width),
            resized=(rows * side, columns * side),
            tiles=(0, 0),
            grids=((rows * parts, columns * parts),),
            tokens=rows * columns,
            prompt=f"{self.begin}{self.image_token * (rows * columns)}{self.end}",
        )

    def _tokens(self, height: int, width: int) -> Size:
        """Rows and columns of tokens: as many as the budget allows with this aspect, rounded down;
        an image too narrow for that has one row or column."""
        side = self.patch * self.pool
        scale = math.sqrt(self.budget * self.pool**2 * self.patch**2 / (height * width))
        rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
        if rows == 0:
            return 1, min(width // height, self.budget)
        if columns == 0:
            return min(height // width, self.budget), 1
        return rows, columns

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        numbers = self.resampling.numbers(self.resampling.resize(image, layout.resized))
        cut: Floats = patches(numbers, layout.resized[0] // layout.grids[0][0])
        return np.ascontiguousarray(cut)
