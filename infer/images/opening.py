"""Opens images: turns a file, bytes, a data: URL or an array into RGB pixels.

A file is what its content says, whatever its name or a data: URL calls it. Its size in bytes and in
pixels is checked before anything is decoded. Nothing is fetched from a network.
"""

from __future__ import annotations

import base64
import io
import os
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote_to_bytes

import numpy as np
from numpy.typing import NDArray

from infer.boundaries import reason, shown
from infer.kernels.errors import InferError, RequestError

if TYPE_CHECKING:
    from PIL import Image

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | NDArray[np.uint8]"
RGB: TypeAlias = NDArray[np.uint8]  # [height, width, 3]

MAX_BYTES = 64 << 20  # of a file
MAX_PIXELS = 80_000_000  # Pillow itself warns of more than 89 million

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_CONVERT = "Convert it to JPEG or PNG."
# How files begin that people take for images: what to call them.
_OTHERS = (
    (re.compile(rb"....ftyp(?:heic|heix|hevc|heim|heis|mif1|msf1)", re.DOTALL), "a HEIC file"),
    (re.compile(rb"....ftyp(?:avif|avis)", re.DOTALL), "an AVIF file"),
    (re.compile(rb"....ftyp", re.DOTALL), "a video"),
    (re.compile(rb"(?:II\*\0|MM\0\*)"), "a TIFF file"),
    (re.compile(rb"BM"), "a BMP file"),
    (re.compile(rb"%PDF"), "a PDF"),
    (re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?<svg", re.DOTALL), "an SVG drawing"),
    (re.compile(rb"\s*<(?:!doctype )?html", re.IGNORECASE), "a page of HTML"),
    (re.compile(rb"version https://git-lfs"), "a pointer of Git LFS, not the file itself"),
)
# Values of EXIF's Orientation, and the names of Pillow's transpositions that undo them.
_ORIENTATIONS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_ORIENTATION = 0x0112


def pillow() -> ModuleType:
    """Returns the module PIL.Image. Raises InferError if Pillow is missing."""
    try:
        from PIL import Image
    except ImportError:
        raise InferError(
            "Images need the package Pillow. Install it: pip install 'infer-wgpu[images]', or in a "
            "checkout pip install '.[images]'."
        ) from None
    return Image


def open_image(
    source: ImageSource, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS
) -> RGB:
    """Returns an image as RGB, uint8 [height, width, 3]. source: a path, the bytes of a file (JPEG,
    PNG, WebP, or GIF, of which the first frame), a data: URL, an image of Pillow, or an array of
    uint8 [height, width, 3], [.., 4] with alpha, [.., 1] or [height, width] in grey. An orientation
    in EXIF is applied, and what is transparent becomes white. Raises RequestError for what is no
    such image, is damaged, or has more bytes or pixels than these, and InferError where Pillow is
    missing."""
    image_module = pillow()
    if isinstance(source, np.ndarray):
        return _of_array(source, max_pixels)
    if isinstance(source, image_module.Image):
        return _of_pillow(source, max_pixels)
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        _check_bytes(len(data), max_bytes)
    elif isinstance(source, str) and source[:5].lower() == "data:":
        data = _data_of_url(source, max_bytes)
    elif isinstance(source, str | os.PathLike):
        data = _read(source, max_bytes)
    else:
        raise RequestError(
            f"An image must be a path, bytes, an image of Pillow or a numpy array, not one of the "
            f"type {type(source).__name__}."
        )
    return _decode(data, max_pixels)


def open_data_url(url: str, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS) -> RGB:
    """Returns the image in a data: URL, as `open_image` does. Raises RequestError for any other URL
    or path, so that what clients send opens no file."""
    pillow()
    if url[:5].lower() != "data:":
        raise RequestError(
            f"The image {_short(url)} is not in a data: URL. Send its content: "
            "data:image/png;base64, and then the file in base64."
        )
    return _decode(_data_of_url(url, max_bytes), max_pixels)


def _short(text: str) -> str:
    return shown(text if len(text) <= 80 else f"{text[:80]}...")


def _check_bytes(count: int, max_bytes: int) -> None:
    if count > max_bytes:
        raise RequestError(
            f"An image of {count:,} bytes is too large: at most {max_bytes:,} are taken. Scale it "
            "down."
        )


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise RequestError(
            f"An image of {width:,} x {height:,} pixels is too large: at most {max_pixels:,} in "
            "all are taken. Scale it down."
        )
    if height * width < 2:
        raise RequestError(
            f"An image of {width} x {height} pixels shows nothing. Give one of at least two pixels."
        )


def _read(source: str | os.PathLike[str], max_bytes: int) -> bytes:
    name = os.fspath(source)
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) if isinstance(name, str) else None
    if scheme:
        raise RequestError(
            f"The image {_short(name)} is a URL, and no URL but data: is opened. Give a path, or "
            "fetch the file and give its bytes."
        )
    try:
        path = Path(name)
        if path.exists() and not path.is_file():  # no pipe or device, which may never end
            raise RequestError(f"{path} is not a file. Give the path of an image.")
        with path.open("rb") as file:
            _check_bytes(os.fstat(file.fileno()).st_size, max_bytes)
            data = file.read(max_bytes + 1)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, RequestError):
            raise
        said = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"The image {_short(str(name))} cannot be read ({said}). Check its path."
        ) from None
    _check_bytes(len(data), max_bytes)
    return data


def _data_of_url(url: str, max_bytes: int) -> bytes:
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise RequestError(
            "A data: URL of an image has no comma before its data. Write data:image/png;base64, "
            "and then the file in base64."
        )
    data = unquote_to_bytes(body)
    if head.lower().replace(" ", "").endswith(";base64"):
        # As browsers do: without white space, and padding may be missing.
        data = re.sub(rb"\s+", b"", data).rstrip(b"=")
        _check_bytes(len(data) * 3 // 4, max_bytes)
        try:
            return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
        except ValueError as error:
            raise RequestError(
                f"A data: URL of an image is not in base64 ({error}). Encode the bytes of the file "
                "in base64."
            ) from None
    _check_bytes(len(data), max_bytes)
    return data


def _decode(data: bytes, max_pixels: int) -> RGB:
    image_module = pillow()
    if not data:
        raise RequestError("An image has no bytes. Give the content of a file.")
    from PIL import UnidentifiedImageError

    too_many = (image_module.DecompressionBombError, image_module.DecompressionBombWarning)
    try:
        with image_module.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(image.height, image.width, max_pixels)
            image.load()
            return _rgb(image)
    except (InferError, MemoryError):
        raise
    except UnidentifiedImageError:
        what = next((name for begin, name in _OTHERS if begin.match(data)), None)
        raise RequestError(
            f"This is {what}. Images are read in JPEG, PNG, WebP and GIF. {_CONVERT}"
            if what
            else "This is no image in JPEG, PNG, WebP or GIF, or its beginning is damaged. Give "
            "the content of such a file."
        ) from None
    except too_many as error:
        raise RequestError(
            f"An image has too many pixels: {reason(error)} Scale it down."
        ) from None
    except Exception as error:  # decoders raise errors of all kinds for damaged files
        raise RequestError(
            f"An image is damaged or cut off: {reason(error)} Send the whole file."
        ) from None


def _of_pillow(image: Image.Image, max_pixels: int) -> RGB:
    _check_size(image.height, image.width, max_pixels)
    try:
        image.load()
        return _rgb(image)
    except (InferError, MemoryError):
        raise
    except Exception as error:
        raise RequestError(
            f"An image of Pillow is damaged or cut off: {reason(error)} Open the whole file."
        ) from None


def _of_array(array: NDArray[Any], max_pixels: int) -> RGB:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or array.dtype != np.uint8:
        raise RequestError(
            "An array of an image must be uint8 of the shape [height, width, 3], or with 4 values "
            f"where it has alpha, or 1 in grey; this is {array.dtype} {list(array.shape)}. Scale "
            "values to 0 to 255, and put colours last."
        )
    height, width, values = array.shape
    _check_size(height, width, max_pixels)
    if values == 4:
        return _rgb(pillow().fromarray(np.ascontiguousarray(array)))
    return np.ascontiguousarray(np.broadcast_to(array, (height, width, 3)))


def _rgb(image: Image.Image) -> RGB:
    """The pixels of a decoded image, uint8 [height, width, 3], upright and on white."""
    image_module = pillow()
    turn = _ORIENTATIONS.get(_orientation(image))
    transparency = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        # Pillow's own conversion would make white of all values above 255.
        deep = np.asarray(image)
        grey = (deep >> 8).astype(np.uint8)
        if isinstance(transparency, int):
            grey[deep == transparency] = 255
        image = image_module.fromarray(grey)
    elif image.mode in ("I", "F"):
        raise RequestError(
            f'An image of Pillow in the mode "{image.mode}" does not say which value is white. '
            "Scale its values to 0 to 255, and convert it to L or RGB."
        )
    elif "A" in image.getbands() or transparency is not None:
        if image.mode == "RGB" and isinstance(transparency, tuple) and max(transparency) > 255:
            image = image.copy()
            image.info["transparency"] = tuple(value >> 8 for value in transparency)  # of 16 bits
        image = image.convert("RGBA")
        white = image_module.new("RGBA", image.size, (255, 255, 255, 255))
        image = image_module.alpha_composite(white, image)
    image = image.convert("RGB")
    if turn is not None:
        image = image.transpose(image_module.Transpose[turn])
    return np.asarray(image)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # EXIF that cannot be read turns nothing, as in browsers
        return 1
    return value if isinstance(value, int) else 1
