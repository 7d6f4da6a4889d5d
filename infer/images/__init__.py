"""Images: files and bytes become pixels, and pixels become what the encoder of a model takes."""

from infer.images.opening import MAX_BYTES, MAX_PIXELS, ImageSource, open_data_url, open_image
from infer.images.processor import ImageLayout, ImageProcessor, ProcessedImage
from infer.images.processors import PROCESSORS, open_processor, read_processor

__all__ = [
    "MAX_BYTES",
    "MAX_PIXELS",
    "PROCESSORS",
    "ImageLayout",
    "ImageProcessor",
    "ImageSource",
    "ProcessedImage",
    "open_data_url",
    "open_image",
    "open_processor",
    "read_processor",
]
