"""Opening images: Pillow writes the files, and what it reads back is the reference."""

import base64
import io
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import numpy as np
import pytest
from numpy.typing import NDArray

from infer.images import open_data_url, open_image
from infer.kernels.errors import InferError, RequestError

PIL = pytest.importorskip("PIL")

from PIL import Image, ImageOps  # noqa: E402

HEIGHT, WIDTH = 20, 30


@pytest.fixture(scope="module")
def pixels() -> NDArray[np.uint8]:
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([rows * 12, columns * 8, 255 - columns * 8], axis=-1).astype(np.uint8)


def written(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: Any) -> bytes:
    """A PNG by hand, of what Pillow does not write. rows: each begins with a zero."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in (
        (b"IHDR", head),
        *chunks,
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ):
        data += struct.pack(">I", len(content)) + name + content
        data += struct.pack(">I", zlib.crc32(name + content))
    return data


def test_sources_are_all_alike(pixels: NDArray[np.uint8], tmp_path: Path) -> None:
    image = Image.fromarray(pixels)
    data = written(image, "PNG")
    path = tmp_path / "picture.jpg"  # whatever its name says
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    sources = [
        *(path, str(path), data, bytearray(data), memoryview(data), image, pixels),
        f"data:image/png;base64,{text}",
        f"DATA:;Base64,{text.rstrip('=')}",
        f"data:image/webp;charset=x; base64,{text[:50]}\n {text[50:]}",
        f"data:image/png;base64,{text.replace('+', '%2B')}",
        f"data:image/png,{quote_from_bytes(data)}",
    ]
    for source in sources:
        opened = open_image(source)
        assert opened.dtype == np.uint8
        np.testing.assert_array_equal(opened, pixels)
    np.testing.assert_array_equal(open_data_url(sources[7]), pixels)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"quality": 80}),
        ("JPEG", {"quality": 90}),
        ("JPEG", {"progressive": True}),
        ("GIF", {}),
    ],
)
def test_formats_are_found_by_content(
    kind: str, options: dict[str, Any], pixels: NDArray[np.uint8]
) -> None:
    data = written(Image.fromarray(pixels), kind, **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(open_image(data), expected)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(kind: str, pixels: NDArray[np.uint8]) -> None:
    frames = [Image.fromarray(pixels[:, :, ::step]) for step in (1, -1)]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = written(frames[0], kind, save_all=True, append_images=frames[1:], **lossless)
    first = np.asarray(frames[0].quantize() if kind == "GIF" else frames[0], np.int32)
    opened = open_image(data)
    if kind == "GIF":
        assert np.abs(opened.astype(np.int32) - pixels).mean() < 8
    else:
        np.testing.assert_array_equal(opened, first)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_orientation_is_applied(orientation: int, kind: str, pixels: NDArray[np.uint8]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = written(Image.fromarray(pixels), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        np.testing.assert_array_equal(open_image(image), expected)
    assert expected.shape[:2] == ((WIDTH, HEIGHT) if orientation > 4 else (HEIGHT, WIDTH))
    np.testing.assert_array_equal(open_image(data), expected)


def test_damaged_exif_turns_nothing(pixels: NDArray[np.uint8]) -> None:
    data = written(Image.fromarray(pixels), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7fdamaged")
    np.testing.assert_array_equal(open_image(data), pixels)
    exif = Image.Exif()
    exif[0x0112] = 99
    data = written(Image.fromarray(pixels), "PNG", exif=exif)
    np.testing.assert_array_equal(open_image(data), pixels)


def over_white(colour: NDArray[Any], alpha: NDArray[Any]) -> NDArray[np.float64]:
    part = alpha.astype(np.float64) / 255
    if colour.ndim == 3:
        part = part[..., None]
    return colour * part + 255 * (1 - part)


def test_what_is_transparent_becomes_white(pixels: NDArray[np.uint8]) -> None:
    alpha = np.linspace(0, 255, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint8)
    colours = np.dstack([pixels, alpha])
    expected = over_white(pixels, alpha)
    image = Image.fromarray(colours)
    webp = written(image, "WEBP", lossless=True, exact=True)
    for source in (colours, image, written(image, "PNG"), webp):
        opened = open_image(source)
        assert opened.shape == (HEIGHT, WIDTH, 3)
        assert np.abs(opened - expected).max() <= 1
    grey = Image.merge("LA", [Image.fromarray(pixels[:, :, 0]), Image.fromarray(alpha)])
    expected = over_white(pixels[:, :, 0], alpha)
    for source in (grey, written(grey, "PNG")):
        assert np.abs(open_image(source) - expected[:, :, None]).max() <= 1


def test_palettes(pixels: NDArray[np.uint8]) -> None:
    image = Image.fromarray(pixels).quantize(16)
    colours = np.array(image.getpalette()[:48]).reshape(-1, 3)
    codes = np.asarray(image)
    expected = colours[codes]
    for source in (image, written(image, "PNG"), written(image, "GIF")):
        np.testing.assert_array_equal(open_image(source), expected)
    clear = np.where((codes == 3)[:, :, None], 255, expected)
    assert (clear != expected).any()
    for kind in ("PNG", "GIF"):
        data = written(image, kind, transparency=3)
        np.testing.assert_array_equal(open_image(data), clear)
    alphas = bytes(range(0, 256, 16))
    half = over_white(expected, np.frombuffer(alphas, np.uint8)[codes])
    data = written(image, "PNG", transparency=alphas)
    assert np.abs(open_image(data) - half).max() <= 1


def test_grey_bits_and_cmyk(pixels: NDArray[np.uint8]) -> None:
    grey = pixels[:, :, 1]
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    for source in (grey, grey[:, :, None], written(Image.fromarray(grey), "PNG")):
        np.testing.assert_array_equal(open_image(source), expected)
    bits = Image.fromarray(grey > 100)
    assert bits.mode == "1"
    white = np.repeat(np.where(grey > 100, 255, 0)[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(open_image(written(bits, "PNG")), white)
    cmyk = Image.fromarray(pixels).convert("CMYK")
    opened = open_image(written(cmyk, "JPEG", quality=100, subsampling=0))
    assert np.abs(opened.astype(np.int32) - pixels).max() <= 8
    np.testing.assert_array_equal(open_image(cmyk), np.asarray(cmyk.convert("RGB")))


def test_16_bits() -> None:
    values = np.array([[0, 255, 256, 4660], [32768, 40000, 65279, 65535]], ">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    grey = (values // 256)[:, :, None].repeat(3, axis=2)
    np.testing.assert_array_equal(open_image(png(4, 2, 16, 0, rows)), grey)
    clear = np.where((values == 4660)[:, :, None], 255, grey)
    data = png(4, 2, 16, 0, rows, (b"tRNS", struct.pack(">H", 4660)))
    np.testing.assert_array_equal(open_image(data), clear)
    rgb = values.reshape(1, 8)[:, :6].reshape(1, 2, 3)
    rows = b"\0" + rgb.tobytes()
    np.testing.assert_array_equal(open_image(png(2, 1, 16, 2, rows)), rgb // 256)
    data = png(2, 1, 16, 2, rows, (b"tRNS", struct.pack(">HHH", *rgb[0, 1].tolist())))
    np.testing.assert_array_equal(open_image(data)[0], [[0, 0, 1], [255, 255, 255]])
    deep = Image.fromarray(values.astype("<u2"))
    assert deep.mode == "I;16"
    np.testing.assert_array_equal(open_image(deep), grey)


@pytest.mark.parametrize("shape", [(50_000, 50_000), (50_000, 1601), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_before_they_are_decoded(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(RequestError, match=r"(?s)pixels.*Scale it down"):
        open_image(png(*shape, 8, 2, b""))


def test_the_bounds(pixels: NDArray[np.uint8], tmp_path: Path) -> None:
    image = Image.fromarray(pixels)
    data = written(image, "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    text = "data:image/png;base64," + base64.b64encode(data).decode()
    plain = "data:image/png," + quote_from_bytes(data)
    for source in (data, path, text, plain):
        assert open_image(source, max_bytes=len(data)).shape == pixels.shape
        with pytest.raises(RequestError, match=r"bytes is too large.*Scale it down"):
            open_image(source, max_bytes=len(data) // 2)
    for source in (data, path, text, image, pixels):
        assert open_image(source, max_pixels=HEIGHT * WIDTH).shape == pixels.shape
        with pytest.raises(RequestError, match=r"30 x 20 pixels is too large: at most 599 in all"):
            open_image(source, max_pixels=HEIGHT * WIDTH - 1)


def test_a_file_grows_no_further_than_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # of which nothing is stored
    with pytest.raises(RequestError, match="bytes is too large"):
        open_image(path)


@pytest.mark.parametrize(
    "source",
    [
        np.zeros((1, 1, 3), np.uint8),
        np.zeros((0, 5, 3), np.uint8),
        png(1, 1, 8, 2, b"\0\0\0\0"),
        Image.new("RGB", (1, 1)),
        Image.new("RGB", (0, 7)),
    ],
)
def test_one_pixel_or_none(source: Any) -> None:
    with pytest.raises(RequestError, match=r"pixels shows nothing.*two pixels"):
        open_image(source)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_that_are_cut_off(kind: str, pixels: NDArray[np.uint8]) -> None:
    large = np.tile(pixels, (8, 8, 1))
    large[::3] ^= 85
    data = written(Image.fromarray(large), kind)
    for part in (0.3, 0.6, 0.9):
        with pytest.raises(RequestError, match="damaged"):
            open_image(data[: int(len(data) * part)])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_damaged_files_raise_no_other_error(kind: str, pixels: NDArray[np.uint8]) -> None:
    data = bytearray(written(Image.fromarray(pixels), kind))
    rng = np.random.default_rng(7)
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 5):
            damaged[place] = int(rng.integers(256))
        try:
            open_image(bytes(damaged))
        except RequestError:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no bytes"),
        (b"hello", "no image in JPEG, PNG, WebP or GIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "a HEIC file.*Convert it to JPEG or PNG"),
        (b"\0\0\0\x18ftypavif\0\0\0\0", "an AVIF file"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "a video"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"<?xml version='1.0'?>\n<svg xmlns='x'/>", "an SVG drawing"),
        (b"<!DOCTYPE html><html>", "a page of HTML"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (written(Image.new("RGB", (3, 3)), "BMP"), "a BMP file"),
        (written(Image.new("RGB", (3, 3)), "TIFF"), "a TIFF file"),
        (written(Image.new("RGB", (3, 3)), "PPM"), "no image in JPEG"),
    ],
)
def test_what_is_no_image(data: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        open_image(data)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere/picture.png", "cannot be read.*No such file.*Check its path"),
        ("a\0b", "cannot be read"),
        (".", "is not a file"),
        ("https://example.org/a.png", "is a URL, and no URL but data: is opened"),
        ("file:///etc/passwd", "is a URL"),
        ("FILE://localhost/etc/passwd", "is a URL"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "no bytes"),
        ("data:image/png;base64,****", "not in base64"),
        ("data:image/png;base64,aGVsb", "not in base64"),
        ("data:image/png;base64,aGVsbG8=", "no image in JPEG"),
        (None, "must be a path, bytes, an image of Pillow or a numpy array, not .* NoneType"),
        (5, "of the type int"),
        (np.zeros((4, 4, 3), np.float32), r"float32 \[4, 4, 3\]. Scale"),
        (np.zeros((3, 4, 5), np.uint8), r"uint8 \[3, 4, 5\]"),
        (np.zeros((4,), np.uint8), r"uint8 \[4\]"),
        (Image.new("F", (3, 3)), 'mode "F" does not say which value is white'),
        (Image.new("I", (3, 3)), 'mode "I"'),
    ],
)
def test_sources_that_are_refused(source: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        open_image(source)


def test_a_long_url_is_not_repeated() -> None:
    with pytest.raises(RequestError) as caught:
        open_image("http://" + "x" * 5000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("make", [str, lambda path: path.as_uri(), lambda path: "http://x/a.png"])
def test_a_data_url_opens_no_file(
    make: Callable[[Path], str], pixels: NDArray[np.uint8], tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    with pytest.raises(RequestError, match=r"is not in a data: URL. Send its content"):
        open_data_url(make(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(RequestError, match="is not a file"):
        open_image(path)


def test_an_image_of_pillow_whose_file_is_cut_off(pixels: NDArray[np.uint8]) -> None:
    data = written(Image.fromarray(np.tile(pixels, (8, 8, 1))), "JPEG")
    with (
        Image.open(io.BytesIO(data[: len(data) // 2])) as image,
        pytest.raises(RequestError, match="image of Pillow is damaged or cut off"),
    ):
        open_image(image)


def test_an_image_of_pillow_is_left_as_it_was(pixels: NDArray[np.uint8]) -> None:
    image = Image.fromarray(pixels)
    image.info["transparency"] = (300, 0, 0)
    open_image(image)
    assert image.info == {"transparency": (300, 0, 0)}
    assert image.mode == "RGB"


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InferError, match=r"pip install 'infer-wgpu\[images\]'") as caught:
        open_image(b"")
    assert not isinstance(caught.value, RequestError)


def test_the_package_is_imported_without_pillow() -> None:
    code = "import sys; import infer.images, infer.images.llava; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
