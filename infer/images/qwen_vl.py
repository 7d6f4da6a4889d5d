"""Prepares images for Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from infer.images.opening import RGB
from infer.images.processor import (
    Floats,
    ImageLayout,
    ImageProcessor,
    ProcessorConfig,
    Resampling,
    Size,
)
from infer.kernels.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class QwenVL(ImageProcessor):
    """An image of any size, of which each merge x merge patches become a token. Patches come in the
    order in which they are merged, and a patch has `frames` frames, of an image all alike: values
    [3, frames, patch, patch]."""

    kinds = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")

    resampling: Resampling
    patch: int
    merge: int
    frames: int
    least_area: int
    most_area: int
    image_token: str
    marker: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> QwenVL:
        raw = config.images
        size = raw.section("size")
        least, most = 56 * 56, 28 * 28 * 1280
        if size.values:
            least = size.size("shortest_edge" if "shortest_edge" in size.values else "min_pixels")
            most = size.size("longest_edge" if "longest_edge" in size.values else "max_pixels")
        least, most = raw.size("min_pixels", least), raw.size("max_pixels", most)
        if least > most:
            raise UnsupportedError(
                f"{raw.place}: an image must have at least {least} pixels, and at most {most}."
            )
        token = config.token("image_token", "<|image_pad|>")
        return cls(
            resampling=Resampling.read(raw),
            patch=raw.size("patch_size", 14),
            merge=raw.size("merge_size", 2),
            frames=raw.size("temporal_patch_size", 2),
            least_area=least,
            most_area=most,
            image_token=token,
            marker=token,
        )

    def cut(self, height: int, width: int) -> ImageLayout:
        resized = self._resized(height, width)
        grid = resized[0] // self.patch, resized[1] // self.patch
        tokens = grid[0] * grid[1] // self.merge**2
        return ImageLayout(
            size=(height, width),
            resized=resized,
            tiles=(0, 0),
            grids=(grid,),
            tokens=tokens,
            prompt=self.image_token * tokens,
        )

    def _resized(self, height: int, width: int) -> Size:
        """The nearest multiples of a token's side, with the area within bounds (smart_resize)."""
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.most_area:
            scale = math.sqrt((height * width) / self.most_area)
            rows = max(1, math.floor(height / scale / side))
            columns = max(1, math.floor(width / scale / side))
        elif rows * columns * side * side < self.least_area:
            scale = math.sqrt(self.least_area / (height * width))
            rows, columns = math.ceil(height * scale / side), math.ceil(width * scale / side)
        return rows * side, columns * side

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        numbers = self.resampling.numbers(self.resampling.resize(image, layout.resized))
        (rows, columns), merge, patch = layout.grids[0], self.merge, self.patch
        cut = numbers.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)  # .., 3, patch, patch
        cut = np.broadcast_to(
            cut[:, :, :, :, :, None], (*cut.shape[:5], self.frames, *cut.shape[5:])
        )
        return np.ascontiguousarray(cut.reshape(rows * columns, -1))
