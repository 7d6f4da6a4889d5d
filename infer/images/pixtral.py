"""Prepares images for Pixtral's encoder, which Mistral Small 3 and 4 and Ministral 3 have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infer.images.opening import RGB
from infer.images.processor import (
    Floats,
    ImageLayout,
    ImageProcessor,
    ProcessorConfig,
    Resampling,
    longest_edge,
    square,
)


@dataclass(frozen=True, eq=False)
class Pixtral(ImageProcessor):
    """An image of any shape, in which merge x merge patches become a token. In the prompt a row of
    tokens ends with a break, and the last with an end."""

    kinds = ("PixtralImageProcessor",)

    resampling: Resampling
    longest: int
    patch: int
    merge: int
    image_token: str
    marker: str
    row_end: str
    end: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> Pixtral:
        raw, model = config.images, config.model
        raw.expect("do_center_crop", False)
        patch = config.prompts.size("patch_size", square(raw, "patch_size", 16))
        merge = config.prompts.size("spatial_merge_size", 2)
        token = config.token("image_token", "[IMG]")
        return cls(
            resampling=Resampling.read(raw),
            longest=longest_edge(raw, "size", 1024),
            # What the encoder has goes before what the other files say of it.
            patch=model.section("vision_config").size("patch_size", patch),
            merge=model.size("spatial_merge_size", merge),
            image_token=token,
            marker=token,
            row_end=config.token("image_break_token", "[IMG_BREAK]"),
            end=config.token("image_end_token", "[IMG_END]"),
        )

    def cut(self, height: int, width: int) -> ImageLayout:
        side, size = self.patch * self.merge, (height, width)
        scale = max(height / self.longest, width / self.longest)
        if scale > 1:
            # At least 1: transformers makes an image of no rows of one that is too narrow.
            height, width = max(1, math.floor(height / scale)), max(1, math.floor(width / scale))
        rows, columns = (height - 1) // side + 1, (width - 1) // side + 1
        row = self.image_token * columns
        return ImageLayout(
            size=size,
            resized=(rows * side, columns * side),
            tiles=(0, 0),
            grids=((rows * self.merge, columns * self.merge),),
            tokens=rows * columns,
            prompt=self.row_end.join([row] * rows) + self.end,
        )

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        return self.resampling.pictures([self.resampling.resize(image, layout.resized)])
