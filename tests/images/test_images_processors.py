"""Images as encoders take them, against transformers' processors: scripts/make_image_references.py
made tests/data/images."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from places import DATA

from infer.images import PROCESSORS, ImageProcessor, open_processor, read_processor
from infer.images.processor import ProcessorConfig
from infer.kernels.errors import ModelError, RequestError, UnsupportedError
from infer.models import MULTIMODAL
from infer.models.loading.config import RawConfig

pytest.importorskip("PIL")

IMAGES = DATA / "images"
CASES = sorted(path.stem for path in IMAGES.glob("*.npz") if path.stem != "pictures")
PUBLISHED: dict[str, Any] = json.loads((IMAGES / "sizes.json").read_text(encoding="utf-8"))


def config(case: dict[str, Any]) -> ProcessorConfig:
    files = (RawConfig(dict(case[name]), name) for name in ("images", "prompts", "model"))
    return ProcessorConfig(*files, tokens={})


def processor(case: dict[str, Any]) -> ImageProcessor:
    return read_processor(config(case)).among(case["count"])


def load(name: str) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    with np.load(IMAGES / f"{name}.npz") as file:
        return json.loads(str(file["case"])), {key: file[key] for key in file if key != "case"}


@pytest.fixture(scope="module")
def pictures() -> dict[str, NDArray[np.uint8]]:
    with np.load(IMAGES / "pictures.npz") as file:
        return dict(file)


def qwen(**images: Any) -> dict[str, Any]:
    return {"model": {"model_type": "qwen3_vl"}, "images": images, "prompts": {}, "count": 1}


@pytest.mark.parametrize("name", CASES)
def test_pixels_and_prompts_are_those_of_transformers(
    name: str, pictures: dict[str, NDArray[np.uint8]]
) -> None:
    case, pixels = load(name)
    process = processor(case)
    # The torchvision backend, of which these two are, multiplies and adds in another order.
    rounding = 1e-6 if name.startswith(("lfm2_vl", "gemma4_unified")) else 0
    for key, (tokens, grids, prompt) in case["pictures"].items():
        made = process(pictures[key])
        assert made.pixels.dtype == np.float32
        assert made.pixels.shape == pixels[key].shape, key
        np.testing.assert_allclose(made.pixels, pixels[key], rtol=0, atol=rounding, err_msg=key)
        layout = made.layout
        assert layout.size == pictures[key].shape[:2]
        assert [list(grid) for grid in layout.grids] == grids, key
        assert layout.prompt == prompt, key
        assert layout.tokens == tokens == prompt.count(process.image_token), key


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_tokens_of_published_models_are_those_of_transformers(name: str) -> None:
    process = processor(PUBLISHED[name])
    for height, width, tokens, digest in PUBLISHED[name]["sizes"]:
        layout = process.layout(height, width)
        assert layout.tokens == tokens, (height, width)
        assert hashlib.sha256(layout.prompt.encode()).hexdigest() == digest, (height, width)


def test_every_model_that_sees_has_a_processor() -> None:
    assert PROCESSORS.keys() == MULTIMODAL.keys()


@pytest.mark.parametrize("name", CASES)
def test_pixels_of_an_image_do_not_change_it(
    name: str, pictures: dict[str, NDArray[np.uint8]]
) -> None:
    image = pictures["wide"].copy()
    image.flags.writeable = False
    processor(load(name)[0])(image)
    np.testing.assert_array_equal(image, pictures["wide"])


@pytest.mark.parametrize("name", CASES)
def test_narrow_images_take_bounded_tokens_or_are_refused(name: str) -> None:
    process = processor(load(name)[0])
    usual = max(process.layout(size, 2 * size).tokens for size in range(2, 200, 3))
    for height, width in ((1, 2), (2, 1), (1, 201), (90_000, 1), (1, 90_000), (8_000, 10_000)):
        with suppress(RequestError):
            layout = process.layout(height, width)
            assert 0 < layout.tokens <= 4 * usual, (height, width)
            assert min(layout.resized) > 0


def test_an_image_that_is_too_narrow_is_refused() -> None:
    process = processor(qwen())
    assert process.layout(10, 2000).tokens
    with pytest.raises(RequestError, match=r"2,001 x 10 pixels is too narrow.*1 to 200"):
        process.layout(10, 2001)


def test_the_bounds_of_an_area_have_three_spellings() -> None:
    bounds = {"least_area": 1000, "most_area": 90000}
    for images in (
        {"size": {"shortest_edge": 1000, "longest_edge": 90000}},
        {"size": {"min_pixels": 1000, "max_pixels": 90000}},
        {"min_pixels": 1000, "max_pixels": 90000, "size": {"shortest_edge": 1, "longest_edge": 2}},
    ):
        process = processor(qwen(**images))
        assert {name: getattr(process, name) for name in bounds} == bounds


@pytest.mark.parametrize(
    ("model_type", "images", "said"),
    [
        ("qwen3_vl", {"do_resize": False}, "do_resize"),
        ("qwen3_vl", {"resample": 7}, "resample"),
        ("qwen3_vl", {"image_mean": [0.5]}, "image_mean must be 3 numbers"),
        ("qwen3_vl", {"image_std": [0.5, 0.5, 0.0]}, "image_std"),
        ("qwen3_vl", {"patch_size": 0}, "patch_size"),
        ("qwen3_vl", {"min_pixels": 9, "max_pixels": 8}, "at least 9 pixels"),
        ("qwen3_vl", {"image_processor_type": "PixtralImageProcessor"}, "image_processor_type"),
        ("qwen3_vl", {"size": {"height": 3, "width": 4}}, "lacks 'min_pixels'"),
        ("mistral3", {"size": {"height": 3, "width": 4}}, "lacks 'longest_edge'"),
        ("smolvlm", {"max_image_size": {"height": 3, "width": 3}}, "lacks 'longest_edge'"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma3", {"size": {"height": 3, "width": 4}}, "width"),
        ("gemma3", {"size": [3, 4]}, "size must be a square"),
        ("gemma4", {"max_soft_tokens": 100}, "max_soft_tokens"),
        ("lfm2_vl", {"min_tiles": 4, "max_tiles": 3}, "cannot be cut"),
        ("llava", {"do_center_crop": False}, "do_center_crop"),
        ("llava_next", {"image_grid_pinpoints": []}, "is empty"),
        ("llava_next", {"image_grid_pinpoints": [[224, 100]]}, r"\[224, 100\]"),
        ("llava_next", {"image_grid_pinpoints": [[224]]}, r"\[224\]"),
        ("llava_onevision", {"do_center_crop": True}, "do_center_crop"),
        ("internvl", {"min_patches": 3, "max_patches": 2}, "min_patches 3 is above"),
        ("llama", {}, "take no images"),
    ],
)
def test_values_that_are_not_implemented_are_refused(
    model_type: str, images: dict[str, Any], said: str
) -> None:
    case = {"model": {"model_type": model_type}, "images": images, "prompts": {}, "count": 1}
    with pytest.raises(UnsupportedError, match=said):
        processor(case)


def test_values_that_are_not_normalized() -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    shape = {"size": {"height": 4, "width": 4}}
    case = {"model": {"model_type": "gemma3"}, "prompts": {}, "count": 1}
    plain = processor({**case, "images": {**shape, "do_normalize": False, "do_rescale": False}})
    np.testing.assert_array_equal(plain(image).pixels[0], image.transpose(2, 0, 1))
    scaled = processor({**case, "images": {**shape, "do_normalize": False, "rescale_factor": 0.5}})
    np.testing.assert_array_equal(scaled(image).pixels[0], image.transpose(2, 0, 1) / 2)


def test_a_processor_is_opened_from_a_folder(tmp_path: Path) -> None:
    def write(name: str, **values: Any) -> None:
        (tmp_path / name).write_text(json.dumps(values), encoding="utf-8")

    images = {"size": {"longest_edge": 64}, "image_processor_type": "PixtralImageProcessorFast"}
    write("config.json", model_type="mistral3", vision_config={"patch_size": 8})
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        open_processor(tmp_path)
    write("preprocessor_config.json", **images)
    process = open_processor(tmp_path)
    assert process.layout(32, 40).prompt == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    # As transformers writes it since version 5: what is nested there goes before the other file.
    write("processor_config.json", image_processor={**images, "size": {"longest_edge": 16}})
    assert open_processor(tmp_path).layout(32, 32).prompt == "[IMG][IMG_END]"
    write("processor_config.json", image_break_token="|", spatial_merge_size=4)
    write("tokenizer_config.json", image_token={"content": "<i>"}, extra_special_tokens={"a": "b"})
    process = open_processor(tmp_path)
    assert process.layout(64, 32).prompt == "<i>|<i>[IMG_END]"
    assert process.marker == process.image_token == "<i>"
