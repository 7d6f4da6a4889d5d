"""Prepares images for InternVL3."""

from __future__ import annotations

from dataclasses import dataclass

from infer.images.opening import RGB
from infer.images.processor import (
    Floats,
    ImageLayout,
    ImageProcessor,
    ProcessorConfig,
    Resampling,
    square,
    tiles,
)
from infer.images.tiling import best_tiles
from infer.kernels.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class InternVL(ImageProcessor):
    """Square tiles of an image, and behind two or more the whole of it in one more."""

    kinds = ("GotOcr2ImageProcessor",)

    resampling: Resampling
    side: int
    patch: int
    least_tiles: int
    most_tiles: int
    tile_tokens: int
    image_token: str
    marker: str
    begin: str
    end: str

    @classmethod
    def read(cls, config: ProcessorConfig) -> InternVL:
        raw, model = config.images, config.model
        token = config.token("context_image_token", "<IMG_CONTEXT>")
        least, most = raw.size("min_patches", 1), raw.size("max_patches", 12)
        seen = config.prompts.size("image_seq_length", 256)
        if least > most:
            raise UnsupportedError(f"{raw.place}: min_patches {least} is above max_patches {most}.")
        return cls(
            resampling=Resampling.read(raw),
            side=square(raw, "size", 384),
            patch=square(model.section("vision_config"), "patch_size", 14),
            least_tiles=least,
            # transformers' InternVLProcessor cuts whatever preprocessor_config.json says of it.
            most_tiles=most,
            tile_tokens=model.size("image_seq_length", seen),
            image_token=token,
            marker=token,
            begin=config.token("start_image_token", "<img>"),
            end=config.token("end_image_token", "</img>"),
        )

    def cut(self, height: int, width: int) -> ImageLayout:
        size, grid = (self.side, self.side), self.side // self.patch
        rows, columns = best_tiles(height, width, size, self.least_tiles, self.most_tiles)
        if rows == columns == 1:
            rows = columns = 0
        pictures = rows * columns + 1
        tokens = pictures * self.tile_tokens
        return ImageLayout(
            size=(height, width),
            resized=size,
            tiles=(rows, columns),
            grids=((grid, grid),) * pictures,
            tokens=tokens,
            prompt=f"{self.begin}{self.image_token * tokens}{self.end}",
        )

    def pixels(self, image: RGB, layout: ImageLayout) -> Floats:
        rows, columns = layout.tiles
        resize, size = self.resampling.resize, (self.side, self.side)
        whole = resize(image, size)
        if not rows:
            return self.resampling.pictures([whole])
        cut = tiles(resize(image, (rows * self.side, columns * self.side)), size)
        return self.resampling.pictures([*cut, whole])
