"""Makes tests/data/images: what transformers' processors make of images.

    python scripts/make_image_references.py

Needs torch and transformers (`pip install infer-wgpu[reference]`), Pillow before 13, which scales
the width before the height, as infer and torchvision do, and torchvision for LFM2-VL and Gemma 4's
unified model, whose processors have no other backend. All resize by Pillow here: in torchvision's
kernels, which those two would take, single values differ by 1 or 2 of 255.

pictures.npz holds pictures by name, uint8 [height, width, 3]. NAME.npz is of a case of CASES:

    case       JSON: its config.json, preprocessor_config.json and processor_config.json, how many
               images the prompt has, and for every picture the number of tokens, the rows and
               columns of patches of each image that the encoder takes, and the prompt's text
    PICTURE    float32: the pixels, without what transformers adds so that images fit one tensor

sizes.json is of the configs of PUBLISHED: [height, width, tokens, SHA-256 of the prompt's text].
"""

import hashlib
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
from transformers.processing_utils import ProcessorMixin

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "images"

# (height, width): off every grid, narrow, small, and on a grid
SHAPES = {
    "wide": (37, 61),
    "tall": (83, 30),
    "strip": (2, 190),
    "post": (170, 9),
    "small": (7, 6),
    "grid": (64, 64),
    "large": (121, 157),
}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# model_type -> modules of transformers: folder and class of the image processor, of the processor
QWEN = ("qwen2_vl", "Qwen2VL", "qwen2_vl", "Qwen2VL")
CLASSES = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "qwen3_5": QWEN,
    "gemma3": ("gemma3", "Gemma3", "gemma3", "Gemma3"),
    "gemma4": ("gemma4", "Gemma4", "gemma4", "Gemma4"),
    "gemma4_unified": ("gemma4_unified", "Gemma4Unified", "gemma4_unified", "Gemma4Unified"),
    "mistral3": ("pixtral", "Pixtral", "pixtral", "Pixtral"),
    "idefics3": ("idefics3", "Idefics3", "idefics3", "Idefics3"),
    "smolvlm": ("smolvlm", "SmolVLM", "smolvlm", "SmolVLM"),
    "lfm2_vl": ("lfm2_vl", "Lfm2Vl", "lfm2_vl", "Lfm2Vl"),
    "llava": ("clip", "CLIP", "llava", "Llava"),
    "llava_next": ("llava_next", "LlavaNext", "llava_next", "LlavaNext"),
    "llava_onevision": ("llava_onevision", "LlavaOnevision", "llava_onevision", "LlavaOnevision"),
    "internvl": ("got_ocr2", "GotOcr2", "internvl", "InternVL"),
}
TOKENS = {
    "qwen": {"image_token": "<|image_pad|>"},
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "gemma4": {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
}

Case = dict[str, Any]  # model, images, prompts: config.json and the other two; count: of images


def case(
    model_type: str, model: Any = None, prompts: Any = None, count: int = 1, **images: Any
) -> Case:
    config = {"model_type": model_type, **(model or {})}
    return {"model": config, "images": images, "prompts": prompts or {}, "count": count}


CASES: dict[str, Case] = {
    "qwen2_vl": case("qwen2_vl", patch_size=4, min_pixels=512, max_pixels=4096),
    "qwen3_vl": case(
        "qwen3_vl",
        patch_size=4,
        size={"shortest_edge": 640, "longest_edge": 3000},
        **HALF,
    ),
    "qwen3_5": case(
        "qwen3_5",
        patch_size=2,
        merge_size=3,
        temporal_patch_size=1,
        size={"shortest_edge": 100, "longest_edge": 2000},
        **HALF,
    ),
    "gemma3": case(
        "gemma3",
        {"mm_tokens_per_image": 4, "vision_config": {"patch_size": 8}},
        {"image_seq_length": 4},
        size={"height": 32, "width": 32},
        do_pan_and_scan=None,
    ),
    "gemma4": case("gemma4", patch_size=2, pooling_kernel_size=3, max_soft_tokens=70),
    "gemma4_unified": case(
        "gemma4_unified", patch_size=2, pooling_kernel_size=2, max_soft_tokens=140
    ),
    "mistral3": case(
        "mistral3",
        {"spatial_merge_size": 2, "vision_config": {"patch_size": 4}},
        {"patch_size": 4, "spatial_merge_size": 2},
        patch_size={"height": 4, "width": 4},
        size={"longest_edge": 100},
    ),
    "idefics3": case(
        "idefics3",
        {"scale_factor": 2, "vision_config": {"patch_size": 4}},
        {"image_seq_len": 4},
        size={"longest_edge": 48},
        max_image_size={"longest_edge": 16},
    ),
    "smolvlm": case(
        "smolvlm",
        {"scale_factor": 2, "vision_config": {"patch_size": 4}},
        {"image_seq_len": 16},
        size={"longest_edge": 50},
        max_image_size={"longest_edge": 32},
    ),
    "smolvlm_whole": case(
        "smolvlm",
        {"scale_factor": 2, "vision_config": {"patch_size": 4}},
        {"image_seq_len": 16},
        do_image_splitting=False,
        size={"longest_edge": 50},
        max_image_size={"longest_edge": 32},
    ),
    "lfm2_vl": case(
        "lfm2_vl",
        do_resize=False,  # as in published files
        encoder_patch_size=4,
        tile_size=32,
        min_image_tokens=4,
        max_image_tokens=16,
    ),
    "lfm2_vl_whole": case(
        "lfm2_vl",
        encoder_patch_size=4,
        do_image_splitting=False,
        min_image_tokens=9,
        max_image_tokens=20,
    ),
    "llava": case(
        "llava",
        {"vision_config": {"patch_size": 8, "model_type": "clip_vision_model"}},
        {
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
    ),
    "llava_crop": case(
        "llava",
        {
            "vision_config": {"patch_size": 8, "model_type": "siglip_vision_model"},
            "vision_feature_select_strategy": "full",
        },
        {"patch_size": 8, "vision_feature_select_strategy": "full"},
        size={"shortest_edge": 21},
        crop_size={"height": 32, "width": 32},
    ),
    "llava_pad": case(
        "llava",
        {"vision_config": {"patch_size": 8, "model_type": "clip_vision_model"}},
        {
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        image_processor_type="LlavaImageProcessor",
        do_pad=True,
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
    ),
    "llava_next": case(
        "llava_next",
        {"vision_config": {"patch_size": 4, "model_type": "clip_vision_model"}},
        {
            "patch_size": 4,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
    ),
    "llava_onevision": case(
        "llava_onevision",
        {"vision_config": {"patch_size": 4}, "vision_aspect_ratio": "anyres_max_3"},
        {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_3",
        },
        size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16 * rows, 16 * cols] for rows in (1, 2, 3) for cols in (1, 2, 3)],
    ),
    "llava_onevision_two": case(
        "llava_onevision",
        {"vision_config": {"patch_size": 4}},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        count=2,
        size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 16], [32, 32]],
    ),
    "internvl": case(
        "internvl",
        {"vision_config": {"patch_size": [4, 4]}, "image_seq_length": 4},
        {"image_seq_length": 4},
        size={"height": 16, "width": 16},
        max_patches=6,
        **HALF,
    ),
}

# As in the files that were published with models.
PUBLISHED: dict[str, Case] = {
    "Qwen2-VL": case("qwen2_vl", min_pixels=3136, max_pixels=12845056, patch_size=14),
    "Qwen3-VL": case(
        "qwen3_vl",
        patch_size=16,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
        **HALF,
    ),
    "Gemma 4": case("gemma4"),
    "Gemma 4, 1,120 tokens": case("gemma4", max_soft_tokens=1120),
    "Mistral Small 3.1": case(
        "mistral3",
        {"spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
        {"patch_size": 14, "spatial_merge_size": 2},
        patch_size=14,
        size={"longest_edge": 1540},
    ),
    "SmolVLM2": case(
        "smolvlm",
        {"scale_factor": 4, "vision_config": {"patch_size": 16}},
        {"image_seq_len": 64},
        size={"longest_edge": 2048},
        max_image_size={"longest_edge": 512},
    ),
    "LFM2-VL": case("lfm2_vl"),
    "LLaVA 1.6": case(
        "llava_next",
        {"vision_config": {"patch_size": 14, "model_type": "clip_vision_model"}},
        {
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        size={"shortest_edge": 336},
        crop_size={"height": 336, "width": 336},
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    ),
    "LLaVA-OneVision": case(
        "llava_onevision",
        {"vision_config": {"patch_size": 14}},
        {"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
    ),
    "InternVL3": case(
        "internvl",
        {"vision_config": {"patch_size": [14, 14]}, "image_seq_length": 256},
        {"image_seq_length": 256},
        size={"height": 448, "width": 448},
    ),
}
SIZES = [
    *[(2, 1), (10, 10), (33, 17), (100, 300), (336, 336), (448, 449), (511, 513), (480, 640)],
    *[(768, 1024), (1000, 1001), (1080, 1920), (1920, 1080), (1365, 2048), (40, 2000)],
    *[(1500, 30), (900, 2500), (1600, 1600)],
]


def picture(height: int, width: int) -> NDArray[np.uint8]:
    """Gradients, an edge, and noise in one corner."""
    rng = np.random.default_rng(height * 1000 + width)
    rows, columns = np.mgrid[:height, :width] / max(height, width)
    image = np.stack([255 * rows, 255 * columns, 255 * (1 - columns)], axis=-1)
    image[rows + 2 * columns > 1.2] //= 3
    image[: height // 4, : width // 4] = rng.integers(0, 256, (height // 4, width // 4, 3))
    return image.clip(0, 255).astype(np.uint8)


def resize_by_pillow(
    image: torch.Tensor, size: list[int], interpolation: InterpolationMode, **_: Any
) -> torch.Tensor:
    """In place of torchvision's resize."""
    (height, width), resample = size, Image.Resampling[interpolation.name]
    made = [
        np.array(Image.fromarray(each.permute(1, 2, 0).numpy()).resize((width, height), resample))
        for each in image.reshape(-1, *image.shape[-3:])
    ]
    stacked = torch.stack([torch.from_numpy(each).permute(2, 0, 1) for each in made])
    return stacked.reshape(*image.shape[:-2], height, width)


def tokenizer(model_type: str) -> Any:
    family = "qwen" if model_type.startswith("qwen") else model_type.removesuffix("_unified")
    tokens = TOKENS.get(family, {})
    ids = {f"{name}_id": 1 for name in tokens}
    return SimpleNamespace(
        **tokens,
        **ids,
        convert_tokens_to_ids=lambda token: 1,
        encode=lambda text, **_: [1],
        add_special_tokens=lambda tokens: 0,
    )


def bare(self: Any, image_processor: Any = None, *args: Any, **kwargs: Any) -> None:
    """In place of ProcessorMixin.__init__, which wants a real tokenizer."""
    self.image_processor = image_processor


def processors(config: Case) -> tuple[Any, Any]:
    """Returns transformers' image processor and processor of a case."""
    model_type = config["model"]["model_type"]
    folder, name, processor_folder, processor_name = CLASSES[model_type]
    options = dict(config["images"])
    if options.pop("image_processor_type", None) == "LlavaImageProcessor":
        folder, name = "llava", "Llava"
    torchvision = model_type in ("lfm2_vl", "gemma4_unified")
    module = f"image_processing_{folder}" if torchvision else f"image_processing_pil_{folder}"
    found = import_module(f"transformers.models.{folder}.{module}")
    cls = getattr(found, f"{name}ImageProcessor" + ("" if torchvision else "Pil"))
    images = cls(**options)
    found = import_module(f"transformers.models.{processor_folder}.processing_{processor_folder}")
    found.num2words = str  # a package that only SmolVLM's videos need
    made = getattr(found, f"{processor_name}Processor")
    others = {}
    if model_type.startswith("gemma4"):
        others["feature_extractor"] = None
    if model_type not in ("gemma3", "idefics3", "lfm2_vl", "llava", "llava_next", "mistral3"):
        others["video_processor"] = None
    processor = made(
        image_processor=images, tokenizer=tokenizer(model_type), **others, **config["prompts"]
    )
    processor.image_processor = images
    return images, processor


def processed(
    config: Case, image: NDArray[np.uint8]
) -> tuple[NDArray[np.float32], list[tuple[int, int]], str]:
    """Returns the pixels, the grids of patches, and the text in the prompt, of an image."""
    model_type = config["model"]["model_type"]
    images, processor = processors(config)
    options: dict[str, Any] = {}
    if model_type in ("idefics3", "smolvlm", "lfm2_vl"):
        options["return_row_col_info"] = True
    if model_type == "internvl":
        options["crop_to_patches"] = True
    if model_type == "mistral3":
        options["patch_size"] = processor.patch_size * processor.spatial_merge_size
    nests = model_type in ("idefics3", "smolvlm", "llava_onevision")
    given = Image.fromarray(image)  # of arrays, 3 or 4 rows would be taken for colours
    nested = [[given] * config["count"]] if nests else [given]
    inputs = images(nested, **options)
    if model_type == "lfm2_vl":
        options["use_image_special_tokens"] = True
    prompt = processor.replace_image_token(inputs, 0, **options)
    pixels = inputs["pixel_values"]
    patch = config["model"].get("vision_config", {}).get("patch_size", 14)
    patch = patch[0] if isinstance(patch, list) else patch
    if model_type.startswith("qwen"):
        _, *grid = inputs["image_grid_thw"][0].tolist()
        grids = [tuple(grid)]
    elif model_type.startswith("gemma4"):
        places = np.asarray(inputs["image_position_ids"][0])
        kept = places[:, 0] >= 0
        width, height = places.max(axis=0) + 1
        pixels, grids = np.asarray(pixels[0])[kept], [(int(height), int(width))]
    elif model_type == "lfm2_vl":
        grids = [tuple(grid) for grid in inputs["spatial_shapes"].tolist()]
        real = [each[: rows * columns] for each, (rows, columns) in zip(pixels, grids, strict=True)]
        pixels = np.concatenate([np.asarray(each) for each in real])
    else:
        if model_type in ("idefics3", "smolvlm", "llava_next", "llava_onevision"):
            pixels = pixels[0]
        pixels = np.stack([np.asarray(each) for each in pixels])
        grids = [(pixels.shape[2] // patch, pixels.shape[3] // patch)] * len(pixels)
    return np.asarray(pixels, np.float32), grids, prompt


def image_token(config: Case) -> str:
    _, processor = processors(config)
    if config["model"]["model_type"] == "gemma3":
        return TOKENS["gemma3"]["image_token"]
    return str(processor.image_token)


if __name__ == "__main__":
    if int(PIL.__version__.split(".")[0]) > 12:
        raise SystemExit("Pillow 13 may scale the height first. Take pillow<13.")
    functional.resize = resize_by_pillow
    ProcessorMixin.__init__ = bare
    DATA.mkdir(parents=True, exist_ok=True)
    pictures = {name: picture(*shape) for name, shape in SHAPES.items()}
    np.savez_compressed(DATA / "pictures.npz", allow_pickle=False, **pictures)
    for name, config in CASES.items():
        arrays: dict[str, NDArray[Any]] = {}
        told = {}
        for key, image in pictures.items():
            pixels, grids, prompt = processed(config, image)
            arrays[key] = pixels
            told[key] = [prompt.count(image_token(config)), grids, prompt]
        arrays["case"] = np.array(json.dumps({**config, "pictures": told}))
        np.savez_compressed(DATA / f"{name}.npz", allow_pickle=False, **arrays)
        print(name, {key: (array.shape, told[key][0]) for key, array in list(arrays.items())[:-1]})
    sizes: dict[str, Any] = {}
    for name, config in PUBLISHED.items():
        rows = []
        for height, width in SIZES:
            _, _, prompt = processed(config, np.zeros((height, width, 3), np.uint8))
            digest = hashlib.sha256(prompt.encode()).hexdigest()
            rows.append([height, width, prompt.count(image_token(config)), digest])
        sizes[name] = {**config, "sizes": rows}
        print(name, [row[:3] for row in rows])
    text = json.dumps(sizes, indent=1)
    (DATA / "sizes.json").write_text(text + "\n", encoding="utf-8")
