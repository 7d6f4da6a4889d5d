"""GGUF files: written by the format's own package, read as what they were made from."""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import places
import pytest
import tokenizers
from engines import build_engine, scores
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH
from numpy.typing import NDArray
from plans import load_weights
from reference_models import cases, load, relative_error, tolerance_of
from safetensors.numpy import save_file
from test_structured import assert_texts_keep_their_tokens
from tokenizers import decoders, normalizers, pre_tokenizers

from infer.inspection import _license
from infer.kernels.errors import (
    CheckpointError,
    InferError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedError,
)
from infer.kernels.gpu.device import Device
from infer.models import build_model, open_model
from infer.models.blocks.multimodal import text_config, text_tensors
from infer.models.blocks.rope import rope_table
from infer.models.deepseek_v2 import LatentDecoderConfig
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats import find_format, find_packed
from infer.models.loading.formats import gguf_config as reader
from infer.models.loading.formats.gguf import Gguf
from infer.models.loading.formats.gguf_blocks import BLOCKS, GgufBlocks
from infer.models.loading.formats.gguf_config import gguf_checkpoint, gguf_config
from infer.models.loading.formats.gguf_conversions import CONVERSIONS
from infer.models.loading.formats.packed import Packed, read_flat, read_rows
from infer.models.loading.packing import stored_packed
from infer.models.loading.plan import plan_weights
from infer.models.loading.tensors import TensorInfo
from infer.text.gguf_tokenizer import gguf_tokenizer
from infer.text.tokenizer import Tokenizer

DATA = places.DATA
TEXTS = json.loads((DATA / "text" / "expected.json").read_text(encoding="utf-8"))
Kind = library.GGMLQuantizationType
Array = NDArray[Any]


def write(
    file: Path,
    tensors: Mapping[str, Array] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    arch: str = "llama",
    add: Callable[[library.GGUFWriter], object] = lambda writer: None,
    split: int = 0,
) -> Gguf:
    """A file as the library writes it. Tensors of a kind are given as bytes of its blocks."""
    writer = library.GGUFWriter(file, arch, split_max_tensors=split)
    add(writer)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Gguf.open(file if not split else sorted(file.parent.glob(f"{file.stem}-*"))[0])


# Blocks


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_the_library_makes_of_them(tmp_path: Path, kind: str) -> None:
    block, of = BLOCKS[kind], Kind[kind]
    assert GGML_QUANT_SIZES[of] == (block.values, block.nbytes)
    rng = np.random.default_rng(0)
    rows, columns = 37, 3 * block.values
    data = rng.integers(0, 256, (rows, 3 * block.nbytes), np.uint8)
    if kind == "MXFP4":
        data[:, :: block.nbytes] %= 255  # the exponent that means NaN is a number there
    gguf = write(tmp_path / "m.gguf", {"a": data, "b": data[::-1]}, dict.fromkeys("ab", of))
    checkpoint = Checkpoint(tmp_path, gguf.tensors)
    matrix = GgufBlocks(RawConfig({})).matrix(checkpoint, "a", (rows, columns))
    assert matrix is not None
    with np.errstate(all="ignore"):  # such scales as bytes happen to be
        expected = library.dequantize(data, of)
        grouped = matrix.read(0, rows)
        np.testing.assert_array_equal(grouped.dequantize(), expected)
        np.testing.assert_array_equal(matrix.read(5, 11).dequantize(), expected[5:11])
    scheme = matrix.scheme
    assert grouped.scheme == scheme
    assert grouped.scales.shape == (rows, scheme.groups(columns))
    assert grouped.codes.dtype == (np.int8 if scheme.signed else np.uint8)
    assert int(np.ptp(grouped.codes.astype(int))) == (1 << scheme.bits) - 1
    assert (grouped.biases is not None) == scheme.biases
    for shape in ((rows, columns - 1), (rows + 1, columns), (rows, columns, 1)):
        with pytest.raises(InferError, match="a"):
            GgufBlocks(RawConfig({})).matrix(checkpoint, "a", shape)


# Headers


def test_metadata_is_read(tmp_path: Path) -> None:
    def add(writer: library.GGUFWriter) -> None:
        writer.add_uint8("u8", 200)
        writer.add_int64("i64", -(1 << 40))
        writer.add_float32("f32", 1e-6)
        writer.add_float64("f64", 0.1)
        writer.add_bool("yes", True)
        writer.add_string("text", "größer ▁")
        writer.add_array("texts", ["a", "", "é"])
        writer.add_array("numbers", [1, -2, 3])
        writer.add_array("reals", [0.5, -1.5])

    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.float16),
    }
    gguf = write(tmp_path / "m.gguf", tensors, add=add)
    found = gguf.metadata
    assert found["general.architecture"] == "llama"
    assert (found["u8"], found["i64"], found["yes"]) == (200, -(1 << 40), True)
    assert (found["f32"], found["f64"]) == (1e-6, 0.1)
    assert (found["text"], found["texts"]) == ("größer ▁", ["a", "", "é"])
    assert found["numbers"].tolist() == [1, -2, 3]
    assert found["reals"].tolist() == [0.5, -1.5]
    assert list(gguf.tensors) == ["a", "b"]
    assert [info.dtype for info in gguf.tensors.values()] == ["f32", "f16"]
    for name, array in tensors.items():
        np.testing.assert_array_equal(read_rows(gguf.tensors[name]), array)


def test_a_model_in_several_files_is_read(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full((2, 4), i, np.float32) for i in range(5)}
    gguf = write(tmp_path / "m.gguf", tensors, split=2)
    assert len({info.file for info in gguf.tensors.values()}) == 3
    for name, array in tensors.items():
        np.testing.assert_array_equal(read_rows(gguf.tensors[name]), array)
    with pytest.raises(CheckpointError, match="one of 3 files"):
        Gguf.open(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match="m-00003-of-00003"):
        Gguf.open(tmp_path / "m-00001-of-00003.gguf")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    def add(writer: library.GGUFWriter) -> None:
        writer.add_array("texts", ["one", "two"])
        writer.add_array("numbers", [1, 2, 3])
        writer.add_float32("real", 0.5)

    write(tmp_path / "m.gguf", {"a": np.ones((3, 8), np.float32)}, add=add)
    return tmp_path / "m.gguf"


def test_the_licence(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", add=lambda writer: writer.add_license("apache-2.0"))
    write(tmp_path / "other.gguf")
    assert _license(tmp_path / "m.gguf") == "apache-2.0"
    assert _license(tmp_path / "other.gguf") is None


def test_a_cut_file_is_damaged(small: Path) -> None:
    data = small.read_bytes()
    end = next(iter(Gguf.open(small).tensors.values()))
    for length in range(end.offset + end.nbytes):
        small.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            Gguf.open(small)


def test_no_byte_that_changes_does_harm(small: Path) -> None:
    data = small.read_bytes()
    chance = random.Random(0)
    outcomes = set()
    for at in range(len(data)):
        for value in (0, 255, data[at] ^ 1 << chance.randrange(8)):
            small.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            try:
                gguf = Gguf.open(small)
                assert all(info.offset + info.nbytes <= len(data) for info in gguf.tensors.values())
                outcomes.add("read")
            except InferError as error:
                outcomes.add(type(error).__name__)
    assert outcomes == {"read", "CheckpointError", "UnsupportedError"}


HUGE = (1 << 62).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (0, b"version https://git-lfs", "git lfs pull"),
        (4, b"\x01\0\0\0", "version 1"),
        (4, b"\0\0\0\x03", "big-endian"),
        (8, HUGE, "cannot hold"),
        (16, HUGE, "cannot hold"),
        (24, HUGE, "cannot hold"),
    ],
)
def test_absurd_headers_are_refused(small: Path, at: int, value: bytes, message: str) -> None:
    data = small.read_bytes()
    small.write_bytes(data[:at] + value + data[at + len(value) :])
    with pytest.raises(InferError, match=message):
        Gguf.open(small)


@pytest.mark.parametrize("text", [b"texts", b"numbers"])
def test_absurd_arrays_are_refused(small: Path, text: bytes) -> None:
    data = small.read_bytes()
    at = data.index(text) + len(text) + 4 + 4  # type, type of the items
    small.write_bytes(data[:at] + HUGE + data[at + 8 :])
    with pytest.raises(CheckpointError, match="cannot hold"):
        Gguf.open(small)


def test_blocks_that_are_not_implemented_are_named(tmp_path: Path) -> None:
    data = np.zeros((2, 66), np.uint8)
    with pytest.raises(UnsupportedError, match="a is of type IQ2_XXS"):
        write(tmp_path / "m.gguf", {"a": data}, {"a": Kind.IQ2_XXS})


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf"):
        Gguf.open(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Gguf.open(tmp_path)


# Models


def permuted(array: Array, heads: int) -> Array:
    """Returns rows of q or k as the converter permutes them (LlamaModel.permute)."""
    return (
        array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


# model_type -> general.architecture
ARCHITECTURE = {how.model_type: name for name, how in CONVERSIONS.items()} | {
    "deepseek_v2": "deepseek2",
    "llama": "llama",
    "ministral3": "mistral3",
    "granitemoehybrid": "granite",
    "granitemoehybrid_mamba": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
# Whose norms' weights one is added to.
ADDING = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "nemotron",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
Add = Callable[[library.GGUFWriter, Mapping[str, Any]], object]


def windowed(pattern: int | Sequence[bool] | None = None) -> Add:
    def add(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
        writer.add_sliding_window(raw["sliding_window"] or 0)
        if pattern is not None:
            writer.add_sliding_window_pattern(pattern)

    return add


def add_gemma3(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    windowed(raw["sliding_window_pattern"])(writer, raw)
    writer.add_rope_freq_base_swa(raw["rope_local_base_freq"])


def add_gemma4(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    for key in ("key_length", "value_length", "head_count_kv"):
        writer.kv_data[0].pop(f"gemma4.attention.{key}")
    whole, own, layers = raw["global_head_dim"], raw["head_dim"], raw["num_hidden_layers"]
    slides = [kind == "sliding_attention" for kind in raw["layer_types"]]
    windowed(slides)(writer, raw)
    writer.add_key_length(whole)
    writer.add_value_length(whole)
    writer.add_key_length_swa(own)
    writer.add_value_length_swa(own)
    writer.add_rope_dimension_count_swa(own)
    writer.add_rope_freq_base_swa(raw["rope_parameters"]["sliding_attention"]["rope_theta"])
    turning = int(whole * raw["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    factors = np.array([1.0] * turning + [1e30] * (whole // 2 - turning), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.add_shared_kv_layers(raw["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(raw["hidden_size_per_layer_input"])
    writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    kv_heads, global_kv_heads = raw["num_key_value_heads"], raw["num_global_key_value_heads"]
    if global_kv_heads is None:
        writer.add_head_count_kv(kv_heads)
    else:
        writer.add_head_count_kv([kv_heads if kind else global_kv_heads for kind in slides])
    if raw["use_double_wide_mlp"]:
        writer.kv_data[0].pop("gemma4.feed_forward_length")
        first = layers - raw["num_kv_shared_layers"]
        width = raw["intermediate_size"]
        writer.add_feed_forward_length([width * (1 + (i >= first)) for i in range(layers)])
    if raw["enable_moe_block"]:
        add_experts(writer, raw | {"num_experts_per_tok": raw["top_k_experts"]})


def add_gemma2(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    windowed(raw.get("sliding_window_pattern"))(writer, raw)
    writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(raw["final_logit_softcapping"])


def add_cohere(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_logit_scale(raw["logit_scale"])
    writer.add_rope_scaling_type(library.RopeScalingType.NONE)
    if "sliding_window" in raw:
        windowed(raw["sliding_window_pattern"])(writer, raw)


def add_granite(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_attention_scale(raw["attention_multiplier"])
    writer.add_embedding_scale(raw["embedding_multiplier"])
    writer.add_residual_scale(raw["residual_multiplier"])
    writer.add_logit_scale(raw["logits_scaling"])


def add_phi3(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    windowed()(writer, raw)
    original, scaling = raw["original_max_position_embeddings"], raw["rope_scaling"]
    writer.add_rope_scaling_orig_ctx_len(original)
    if scaling is not None:
        scale = raw["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for length in ("long", "short"):
            factors = np.array(scaling[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def add_hunyuan(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    dim, alpha = raw["head_dim"], raw["rope_scaling"]["alpha"]
    key = "hunyuan-dense.rope.freq_base"
    writer.kv_data[0].pop(key)
    writer.add_rope_freq_base(raw["rope_theta"] * alpha ** (dim / (dim - 2)))
    writer.add_rope_scaling_type(library.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)


def add_parallel(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_parallel_residual(raw.get("use_parallel_residual", True))  # as it is by default


def add_experts(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_expert_count(raw.get("num_local_experts") or raw["num_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    if "norm_topk_prob" in raw:
        writer.add_expert_weights_norm(raw["norm_topk_prob"])
    if "moe_intermediate_size" in raw:
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in raw:
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])


def add_gpt_oss(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    windowed()(writer, raw)
    add_experts(writer, raw)
    writer.add_expert_feed_forward_length(raw["intermediate_size"])
    writer.add_rope_scaling_yarn_beta_fast(raw["rope_scaling"]["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(raw["rope_scaling"]["beta_slow"])


def add_lfm2(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    attends = [state is None for state in build_model(RawConfig(dict(raw))).config.states]
    writer.add_head_count_kv([raw["num_key_value_heads"] * int(having) for having in attends])
    writer.add_shortconv_l_cache(raw["conv_L_cache"])


def add_lfm2_moe(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    add_lfm2(writer, raw)
    add_experts(writer, {key: raw[key] for key in raw if key != "norm_topk_prob"})
    writer.add_leading_dense_block_count(raw["num_dense_layers"])
    writer.add_expert_gating_func(library.ExpertGatingFuncType.SIGMOID)


def add_delta_net(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    heads = raw["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(raw["linear_key_head_dim"])
    writer.add_ssm_group_count(raw["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(raw["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(raw["full_attention_interval"])
    if "rope_parameters" in raw:
        writer.add_rope_dimension_sections([*raw["rope_parameters"]["mrope_section"], 0])
    if "num_experts" in raw:
        add_experts(writer, raw)
    if "intermediate_size" not in raw:
        writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length")


def add_apertus(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    rope = raw["rope_scaling"]
    original = rope["original_max_position_embeddings"]
    factors = llama3_factors(raw["head_dim"], raw["rope_theta"], rope["factor"], original)
    writer.add_tensor("rope_freqs.weight", factors)


def add_yarn(writer: library.GGUFWriter, rope: Mapping[str, Any]) -> None:
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def add_ministral3(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    rope = raw["rope_parameters"]
    add_yarn(writer, rope)
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def add_olmo3(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    windowed([kind == "sliding_attention" for kind in raw["layer_types"]])(writer, raw)
    add_yarn(writer, raw["rope_scaling"])
    writer.add_rope_scaling_yarn_attn_factor(raw["rope_scaling"]["attention_factor"])


def add_olmo(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_clamp_kqv(raw["clip_qkv"])


def add_deepseek_experts(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    add_experts(writer, raw | {"num_experts": raw["n_routed_experts"]})
    writer.add_expert_group_count(raw["n_group"])
    writer.add_expert_group_used_count(raw["topk_group"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
    writer.add_expert_gating_func(library.ExpertGatingFuncType.SIGMOID)


def add_latent(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """Adds the metadata of latent attention; for V3 as the first versions of the converter did."""
    own = writer.kv_data[0]
    for key in ("head_count_kv", "key_length", "value_length"):
        own.pop(f"{writer.arch}.attention.{key}")
    rotary, rank = raw["qk_rope_head_dim"], raw["kv_lora_rank"]
    key_length, value_length = raw["qk_nope_head_dim"] + rotary, raw["v_head_dim"]
    first = raw["model_type"] == "deepseek_v3"
    writer.add_head_count_kv(raw["num_attention_heads"] if first else 1)
    writer.add_key_length(key_length if first else rank + rotary)
    writer.add_value_length(value_length if first else rank)
    if not first:
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(value_length)
    writer.add_kv_lora_rank(rank)
    if raw["q_lora_rank"] is not None:
        writer.add_q_lora_rank(raw["q_lora_rank"])
    if raw["rope_scaling"] is not None:
        add_yarn(writer, raw["rope_scaling"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * raw["rope_scaling"]["mscale_all_dim"])
    add_deepseek_experts(writer, raw)
    if not first:
        own.pop(f"{writer.arch}.expert_gating_func")


def add_ernie_experts(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    counts = {"num_experts": raw["moe_num_experts"], "num_experts_per_tok": raw["moe_k"]}
    add_experts(writer, raw | counts)
    writer.add_expert_shared_count(raw["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(
        raw["intermediate_size"] // raw["num_key_value_heads"]  # as it is written
    )
    writer.add_interleave_moe_layer_step(raw["moe_layer_interval"])
    writer.add_leading_dense_block_count(raw["moe_layer_start_index"])


def add_granite_experts(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    add_granite(writer, raw)
    add_experts(writer, raw)
    if "shared_intermediate_size" in raw:
        writer.kv_data[0].pop("granitemoe.feed_forward_length")
        writer.add_feed_forward_length(raw["intermediate_size"])
        writer.add_expert_shared_feed_forward_length(raw["shared_intermediate_size"])


def add_granite4(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """Adds the metadata of Granite 4's hybrid models, though no layer has Mamba."""
    add_granite(writer, raw)
    writer.kv_data[0].pop("granite.attention.head_count_kv")
    writer.add_head_count_kv([raw["num_key_value_heads"]] * raw["num_hidden_layers"])
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)
    writer.add_expert_shared_feed_forward_length(raw["shared_intermediate_size"])
    for size in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        writer.add_uint32(f"granite.ssm.{size}", 4)
    writer.add_rope_scaling_finetuned(True)


def add_hunyuan_moe(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_expert_count(raw["num_experts"])
    writer.add_expert_used_count(raw["moe_topk"][0])
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"][0])
    writer.add_expert_shared_count(raw["num_shared_expert"][0])
    writer.add_expert_shared_feed_forward_length(raw["intermediate_size"])


def add_granite_hybrid(writer: library.GGUFWriter, raw: Mapping[str, Any]) -> None:
    add_granite(writer, raw)
    add_experts(writer, raw)
    for key in ("feed_forward_length", "attention.head_count_kv"):
        writer.kv_data[0].pop(f"{writer.arch}.{key}")
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_expert_shared_feed_forward_length(raw["shared_intermediate_size"])
    attends = [kind == "attention" for kind in raw["layer_types"]]
    writer.add_head_count_kv([raw["num_key_value_heads"] * int(having) for having in attends])
    writer.add_ssm_conv_kernel(raw["mamba_d_conv"])
    writer.add_ssm_state_size(raw["mamba_d_state"])
    writer.add_ssm_group_count(raw["mamba_n_groups"])
    writer.add_ssm_time_step_rank(raw["mamba_n_heads"])
    writer.add_ssm_inner_size(raw["mamba_expand"] * raw["hidden_size"])
    writer.add_rope_scaling_finetuned(False)


# Metadata that the converter writes besides those of all models, by model_type.
ADD: dict[str, Add] = {
    "apertus": add_apertus,
    "cohere": add_cohere,
    "cohere2": add_cohere,
    "deepseek_v2": add_latent,
    "deepseek_v3": add_latent,
    "dots1": add_deepseek_experts,
    "ernie4_5_moe": add_ernie_experts,
    "exaone4": windowed([True, False, True]),
    "gemma2": add_gemma2,
    "gemma3_text": add_gemma3,
    "gemma4_text": add_gemma4,
    "glm4_moe": add_deepseek_experts,
    "gpt_neox": add_parallel,
    "gpt_oss": add_gpt_oss,
    "granite": add_granite,
    "granitemoe": add_granite_experts,
    "granitemoehybrid": add_granite4,
    "granitemoehybrid_mamba": add_granite_hybrid,
    "granitemoeshared": add_granite_experts,
    "hunyuan_v1_dense": add_hunyuan,
    "hunyuan_v1_moe": add_hunyuan_moe,
    "lfm2": add_lfm2,
    "lfm2_moe": add_lfm2_moe,
    "ministral3": add_ministral3,
    "mixtral": add_experts,
    "olmo": add_olmo,
    "olmo3": add_olmo3,
    "olmoe": add_experts,
    "phi3": add_phi3,
    "qwen2_moe": add_experts,
    "qwen3_5_moe_text": add_delta_net,
    "qwen3_5_text": add_delta_net,
    "qwen3_moe": add_experts,
    "qwen3_next": add_delta_net,
    "stablelm": add_parallel,
    "starcoder2": windowed(),  # the converter leaves it out
}


# Models that also see, and whose text models are converted.
SEEING = ("gemma4",)
# Models whose rows of q and k are permuted.
TURNED = (
    "arcee",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo",
    "smollm3",
)


def published(name: str) -> RawConfig:
    """The config of a stored model, in the spelling that the converter reads."""
    raw = RawConfig(json.loads((DATA / "models" / name / "config.published.json").read_text()))
    return text_config(raw) if name in SEEING else raw


def stored(name: str) -> dict[str, TensorInfo]:
    """Its tensors."""
    return text_tensors(Checkpoint.open(DATA / "models" / name).tensors)


def written_as(name: str) -> str:
    """Returns the key of a case in ARCHITECTURE and ADD: its own name, or else its model_type."""
    return name if name in ARCHITECTURE else str(published(name).values["model_type"])


def of_delta_net(key: str, array: Array, raw: Mapping[str, Any]) -> dict[str, Array]:
    """A tensor of linear attention as the converter has it (modify_tensors of Qwen3NextModel and,
    for Qwen3.5, of _LinearAttentionVReorderBase). Qwen3-Next's in_proj_qkvz stays whole in layer 0,
    as in the first versions of the converter."""
    layer, part = key.split(".linear_attn.")
    keys, heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    key_dim, dim, share = raw["linear_key_head_dim"], raw["linear_value_head_dim"], heads // keys
    if raw["model_type"] != "qwen3_next" and part != "norm.weight":
        last = array.ndim - 1 if part.startswith("out_proj") else 0
        width = 1 if part in ("A_log", "dt_bias") or "_proj_a" in part or "_proj_b" in part else dim
        start = 2 * keys * key_dim if part.startswith(("in_proj_qkv", "conv1d")) else 0
        rows = np.moveaxis(array, last, 0)
        values = rows[start:].reshape(keys, share, width, *rows.shape[1:]).swapaxes(0, 1)
        rows = np.concatenate([rows[:start], values.reshape(rows[start:].shape)])
        array = np.ascontiguousarray(np.moveaxis(rows, 0, last))
    if part == "in_proj_qkvz.weight" and layer.endswith(".1"):
        sizes = np.cumsum([key_dim, key_dim, share * dim])
        parts = np.split(array.reshape(keys, -1, array.shape[1]), sizes, axis=1)
        q, k, v, z = (rows.reshape(-1, array.shape[1]) for rows in parts)
        apart = {"in_proj_qkv": np.concatenate([q, k, v]), "in_proj_z": z}
        return {f"{layer}.linear_attn.{name}.weight": rows for name, rows in apart.items()}
    if part == "A_log":
        array = -np.exp(array)
    part = "dt_proj.bias" if part == "dt_bias" else part
    return {f"{layer}.linear_attn.{part}": array[:, 0] if part.startswith("conv1d") else array}


def of_mamba(key: str, array: Array, raw: Mapping[str, Any]) -> tuple[str, Array]:
    """A tensor of Mamba as the converter has it (modify_tensors of Mamba2Model)."""
    if key.endswith("A_log"):
        return key, -np.exp(array[:, None])
    if key.endswith("mamba.D"):
        return key, array[:, None]
    if key.endswith("norm.weight"):
        return key, array.reshape(raw["mamba_n_groups"], -1)
    key = key.replace("dt_bias", "dt_proj.bias")
    return key, array[:, 0] if key.endswith("conv1d.weight") else array


def by_llama_cpp(name: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors of the hub with the values and the rows that the converter gives them, experts
    and norms of heads stacked, under the names that the library knows."""
    raw = published(name)
    config, kind = build_model(raw).config, raw.values["model_type"]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    made: dict[str, Array] = {}
    stacks: dict[str, list[Array]] = {}
    for key, value in tensors.items():
        array = value
        if kind in TURNED:
            if ".q_proj." in key:
                array = permuted(array, heads)
            if ".k_proj." in key:
                array = permuted(array, kv_heads)
        if kind in ADDING and key.endswith("norm.weight"):
            array = array + (not key.endswith("linear_attn.norm.weight"))
        if kind == "gemma4_text" and not key.endswith(".weight"):
            key = re.sub(r"model\.layers\.(\d+)\.router\.scale", r"blk.\1.ffn_gate_inp.scale", key)
            key = re.sub(
                r"model\.layers\.(\d+)\.router\.per_.*", r"blk.\1.ffn_down_exps.scale", key
            )
            made[key if key.startswith("blk.") else f"{key}.weight"] = array
            continue
        if ".linear_attn." in key:
            made |= of_delta_net(key, array, raw.values)
            continue
        if ".mamba." in key:
            key, made[key] = of_mamba(key, array, raw.values)
            continue
        if key.endswith("block_sparse_moe.input_linear.weight"):
            layer = key.partition(".block_sparse_moe")[0]
            for part, rows in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                made[f"{layer}.mlp.experts.{part}_proj.weight"] = rows
            continue
        if key.endswith("shared_mlp.input_linear.weight"):
            layer, block = key.partition(".shared_mlp")[0], "mlp"
            if config.experts is not None:
                block = "mlp.shared_expert"
            for part, rows in zip(("gate", "up"), np.split(array, 2), strict=True):
                made[f"{layer}.{block}.{part}_proj.weight"] = rows
            continue
        if kind == "granitemoehybrid":
            block = "mlp" if config.experts is None else "mlp.shared_expert"
            key = key.replace("shared_mlp.output_linear", f"{block}.down_proj")
        if kind == "gpt2" and ".c_" in key:
            array = np.ascontiguousarray(array.T)
        if ".kv_b_proj." in key and kind == "deepseek_v2":
            assert isinstance(config, LatentDecoderConfig)
            latent = config.latent
            both = array.reshape(heads, -1, array.shape[1])
            parts_of = np.split(both, [latent.qk_nope_head_dim], axis=1)
            made[key.replace("kv_b_proj", "k_b_proj")] = parts_of[0].swapaxes(1, 2).copy()
            made[key.replace("kv_b_proj", "v_b_proj")] = parts_of[1].copy()
            continue
        if key.endswith("conv.conv.weight"):
            array = array[:, 0]
        if "query_key_value" in key:
            by_head = array.reshape(heads, 3, -1, *array.shape[1:])
            array = by_head.swapaxes(0, 1).reshape(array.shape)
        scalar = raw.values.get("query_pre_attn_scalar")
        if scalar is not None and ("q_norm" in key or (".q_proj" in key and kind == "gemma2")):
            array = array * np.float32((config.head_dim / scalar) ** 0.5)  # llama.cpp knows it
        if match := re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj(_bias)?", key):
            kind_of = "bias" if match[3] else "weight"
            rows = array if match[3] else array.swapaxes(1, 2)
            parts = ("down",) if match[2] == "down" else ("gate", "up")
            for i, part in enumerate(parts):  # gate and up alternate
                made[f"{match[1]}{part}_proj.{kind_of}"] = rows[:, i :: len(parts)].copy()
            continue
        key = f"{key}.weight" if key.endswith("sinks") else key
        key = f"{key}.bias" if key.endswith("expert_bias") else key
        key = re.sub("e_score_correction_bias$", "e_score_correction.bias", key)
        if match := re.fullmatch(r"(.*\.[qk]_layernorm)\.norms\.\d+(\.weight)", key):
            stacks.setdefault(f"{match[1]}{match[2]}", []).append(array)  # of a head each
            continue
        blocks = "mlp|block_sparse_moe|feed_forward"
        match = re.fullmatch(rf"model\.(.*)\.({blocks})\.experts\.\d+\.(.*)", key)
        if match is None:
            made[key] = array[0] if key.endswith("shared_expert_gate.weight") else array
        else:
            block = "model.{}.mlp" if match[2] == "mlp" else "{}.feed_forward"
            stacks.setdefault(f"{block.format(match[1])}.experts.{match[3]}", []).append(array)
    return made | {key: np.stack(arrays) for key, arrays in stacks.items()}


def converted(
    file: Path,
    name: str,
    more: Callable[[library.GGUFWriter], object] = lambda writer: None,
    kind: Kind | None = None,
    dtype: Any = np.float16,
    arch: str = "",
    given: Mapping[str, Array] | None = None,
) -> Gguf:
    """A stored model, written as the converter of llama.cpp does it, matrices in this dtype, or
    quantised if `kind` says so. arch: another architecture than the usual. given: other tensors."""
    raw = published(name)
    config, arch = build_model(raw).config, arch or ARCHITECTURE[written_as(name)]
    names = library.get_tensor_name_map(
        {value: key for key, value in library.MODEL_ARCH_NAMES.items()}[arch],
        config.num_hidden_layers,
    )
    infos = stored(name)
    order = sorted(infos, key=lambda key: [int(x) if x.isdigit() else x for x in key.split(".")])
    tensors: dict[str, Array] = {}
    kinds: dict[str, Kind] = {}
    numbers: dict[str, list[float]] = {}  # of xIELU, by layer
    for key in [key for key in order if ".act_fn." in key]:
        numbers.setdefault(key.rpartition(".")[2], []).append(read_flat(infos[key], 0, 1).item())
        order.remove(key)
    hub = by_llama_cpp(name, {key: read_rows(infos[key]) for key in order})
    for key, array in hub.items():
        own = key if key.startswith("blk.") else names.get_name(key, (".weight", ".bias"))
        assert own is not None
        vector = array.ndim == 1 or not own.endswith(".weight") or own.endswith("_norm.weight")
        tensors[own] = array if vector else array.astype(dtype)
        exact = vector or "ffn_gate_inp" in own or "conv1d" in own
        if kind is not None and not exact:
            tensors[own], kinds[own] = library.quantize(array, kind), kind

    def add(writer: library.GGUFWriter) -> None:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.rope.rotary_dim)
        writer.add_rope_freq_base(config.rope.theta)
        if config.norm.layer_norm:
            writer.add_layer_norm_eps(config.norm.rms_norm_eps)
        else:
            writer.add_layer_norm_rms_eps(config.norm.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        if config.rope.kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(library.RopeScalingType(config.rope.kind))
            writer.add_rope_scaling_factor(config.rope.scaling["factor"])
        if config.rope.kind == "yarn":
            original = config.rope.scaling["original_max_position_embeddings"]
            writer.add_rope_scaling_orig_ctx_len(original)
        for part, values in numbers.items():
            writer.add_array(f"xielu.{part}", values)
        ADD.get(written_as(name), lambda writer, raw: None)(writer, raw.values)
        more(writer)

    return write(file, given or tensors, kinds, arch=arch, add=add)


# Values in these cases' configs that a file cannot have, or has otherwise.
OTHERWISE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "rope_scaling": published("deepseek_v3").values["rope_scaling"] | {"mscale": 1.0}
    },
    "dots1": {"sliding_window": None},
    "gpt_neox_sequential": {"hidden_act": "gelu"},
    "mistral": {"model_type": "llama"},
    "olmoe": {"clip_qkv": None},
    "smollm3": {"no_rope_layers": None},
    "starcoder2": {"rope_theta": 999999.44},  # a float32
}
# Cases whose config is spelled otherwise: only the computation is the same.
COMPUTED = [
    "gemma2",
    "gemma3_text",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "phi3",
    "phi3_longrope",
]
# Computed in the full run alone, as SAME is.
SELDOM = ["apertus", "gemma4_text_experts", "gpt_neox", "granitemoe", "granitemoeshared", "lfm2"]
SELDOM += ["lfm2_moe", "mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text"]
# Cases whose config and tensors are the hub's, however they get there.
SAME = [
    "arcee",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_bigcode",
    "hunyuan_v1_moe",
    "ministral3",
    "nemotron",
    "olmo",
    "olmo3",
]
# Cases with a window, a rope or biases that llama.cpp's files cannot have, or with other names.
UNKNOWN = re.compile(
    "_sliding|_dynamic|llama3|_switch|moe_dense|moe_plain|lfm2_bias|hybrid_e|t_yarn"
)
CONVERTED = [
    case
    for case in cases()
    if published(case).values["model_type"] in ARCHITECTURE and not UNKNOWN.search(case)
]


def test_every_architecture_has_a_case() -> None:
    assert {written_as(case) for case in CONVERTED} == set(ARCHITECTURE)
    assert set(CONVERSIONS) <= set(library.MODEL_ARCH_NAMES.values())


@pytest.fixture
def as_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3's scaling is that of a stored model, which has fewer positions."""
    monkeypatch.setattr(reader, "_LLAMA3", (1.0, 4.0, 32))


@pytest.mark.usefixtures("as_short")
@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_is_the_one_on_the_hub(tmp_path: Path, name: str) -> None:
    gguf = converted(tmp_path / "m.gguf", name)
    config = gguf_config(gguf)
    checkpoint = gguf_checkpoint(gguf, config)
    assert isinstance(find_format(config), GgufBlocks)
    model = build_model(config)
    if name not in COMPUTED:
        original = published(name).values | OTHERWISE.get(name, {})
        assert model.config == build_model(RawConfig(original)).config
    plan_weights(list(model.weights()), checkpoint, ignorable=model.ignorable)
    unlike = {
        "deepseek_v2": "kv_b_proj",
        "deepseek_v2_groups": "kv_b_proj",
        "gemma2": "q_proj",
        "gemma3_text": "q_norm",
        "gemma4_text_experts": ".experts.",
        "gpt2": ".c_",
        "granitemoehybrid": "shared_mlp.",
        "granitemoeshared": "_linear.",
        "gpt_oss": ".experts.",
        "granitemoe": "_linear.",
        "granitemoehybrid_mamba": "_linear.",
        "qwen3_next": "1.linear_attn.in_proj_qkvz",
    }
    for key, info in stored(name).items():
        if unlike.get(name, "none") in key:
            continue
        values = read_rows(info) if info.shape else read_flat(info, 0, 1)[0]
        wanted = values if values.ndim < 2 else values.astype(np.float16).astype(np.float32)
        found = checkpoint.tensors[key]
        if wanted.ndim == 0:
            assert read_flat(found, 0, 1) == [wanted]
            continue
        rtol = 1e-6 if key.endswith("A_log") else 0
        np.testing.assert_allclose(read_rows(found), wanted, rtol=rtol, atol=1e-7)
        for start in range(0, len(values), 7):  # any rows, whole heads or not
            rows = read_rows(found, start, min(start + 5, len(values)))
            np.testing.assert_allclose(rows, wanted[start : start + 5], rtol=rtol, atol=1e-7)


@pytest.mark.usefixtures("as_short")
@pytest.mark.parametrize(
    "name",
    [
        *COMPUTED,
        "gemma4",
        "gpt2",
        "deepseek_v2",
        "gpt_oss",
        "qwen3_next",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("granitemoehybrid_mamba", *SELDOM, *SAME)
        ),
    ],
)
def test_a_converted_model_computes_what_transformers_does(
    device: Device, tmp_path: Path, name: str
) -> None:
    converted(tmp_path / "m.gguf", name, dtype=np.float32)
    reference = load(name)
    ids = reference.prompt_ids.tolist()
    with device.scope():
        logits = scores(build_engine(device, tmp_path / "m.gguf"), ids)
    assert relative_error(logits, reference.logits) <= tolerance_of(name)


def test_a_hybrid_without_experts_or_with_positions(tmp_path: Path) -> None:
    """Granite 4.0 H micro has an MLP and no experts; Bamba is not implemented."""
    gguf = converted(tmp_path / "m.gguf", "granitemoehybrid_mamba")
    gguf.metadata.update({f"granitehybrid.expert_{key}": 0 for key in ("count", "used_count")})
    for name in [name for name in gguf.tensors if "_exps" in name or "_inp" in name]:
        del gguf.tensors[name]
    for name in [name for name in gguf.tensors if "_shexp" in name]:
        plain = name.replace("_shexp", "")
        gguf.tensors[plain] = replace(gguf.tensors.pop(name), name=plain)
    config = gguf_config(gguf)
    assert find_format(config) is not None
    model = build_model(config)
    assert (model.config.experts, model.config.intermediate_size) == (None, 40)
    plan_weights(list(model.weights()), gguf_checkpoint(gguf, config), ignorable=model.ignorable)
    gguf.metadata["granitehybrid.rope.scaling.finetuned"] = True
    with pytest.raises(UnsupportedError, match="finetuned = True"):
        gguf_config(gguf)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("mistral", "mistral3"),
        ("qwen2", "qwen2vl"),
        ("qwen3", "qwen3vl"),
        ("qwen3_moe", "qwen3vlmoe"),
    ],
)
def test_a_text_model_of_one_that_sees_is_read(tmp_path: Path, name: str, arch: str) -> None:
    def add(writer: library.GGUFWriter) -> None:
        if arch.startswith("qwen"):
            writer.add_rope_dimension_sections([2, 3, 3, 0])
        if arch.startswith("qwen3"):
            writer.add_num_deepstack_layers(3)

    model, checkpoint = open_model(converted(tmp_path / "m.gguf", name, add, arch=arch).file)
    original = published(name).values | OTHERWISE.get(name, {})
    assert model.config == build_model(RawConfig(original)).config
    plan_weights(list(model.weights()), checkpoint, ignorable=model.ignorable)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5_text"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, name: str) -> None:
    layers = published(name).values["num_hidden_layers"]

    def add(writer: library.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"{writer.arch}.block_count")
        writer.add_block_count(layers + 1)
        writer.add_nextn_predict_layers(1)
        for part in ("attn_norm", "nextn.eh_proj"):
            writer.add_tensor(f"blk.{layers}.{part}.weight", np.ones(4, np.float32))

    model, found = open_model(converted(tmp_path / "m.gguf", name, add).file)
    plain, wanted = open_model(converted(tmp_path / "plain.gguf", name).file)
    assert model.config == plain.config
    assert found.tensors.keys() == wanted.tensors.keys()


def test_more_layers_that_predict_than_there_are_is_damage(tmp_path: Path) -> None:
    gguf = converted(tmp_path / "m.gguf", "glm4_moe", lambda w: w.add_nextn_predict_layers(2))
    with pytest.raises(CheckpointError, match="of 2 layers, 2 are to predict"):
        gguf_config(gguf)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next"])
def test_delta_nets_of_blocks_are_read_as_on_the_hub(tmp_path: Path, name: str) -> None:
    packed = converted(tmp_path / "packed.gguf", name, kind=Kind.Q8_0)
    floats = {}
    for key, info in packed.tensors.items():
        data = np.fromfile(info.file, np.uint8, info.nbytes, offset=info.offset)
        kind = Kind[info.dtype.upper()]
        floats[key] = library.dequantize(data, kind).reshape(info.shape)
    plain = converted(tmp_path / "plain.gguf", name, given=floats)
    (_, found), (_, wanted) = (open_model(gguf.file) for gguf in (packed, plain))
    assert sum(key.endswith("linear_attn.out_proj.weight") for key in found.packed) == 2
    for key, matrix in found.packed.items():
        values = read_rows(wanted.tensors[key])
        np.testing.assert_array_equal(matrix.read(0, len(values)).dequantize(), values)
        np.testing.assert_array_equal(matrix.read(1, 3).dequantize(), values[1:3])


@pytest.mark.full
def test_a_delta_net_of_blocks_computes_nearly_the_same(device: Device, tmp_path: Path) -> None:
    gguf = converted(tmp_path / "m.gguf", "qwen3_5_text", kind=Kind.Q8_0)
    reference = load("qwen3_5_text")
    with device.scope():
        logits = scores(build_engine(device, gguf.file), reference.prompt_ids.tolist())
    errors = [relative_error(*rows) for rows in zip(logits, reference.logits, strict=True)]
    assert (
        np.mean(errors) <= 0.15
    )  # more than 1 where the columns of out_proj are in the file's order


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_columns_of_blocks_keep_their_order(tmp_path: Path, kind: Kind) -> None:
    """Two heads share a block, but not on the hub: activations are gathered."""
    block = BLOCKS[kind.name]
    data = np.random.default_rng(0).integers(0, 256, (5, 2 * block.nbytes), np.uint8)
    key = "blk.0.ssm_out.weight"
    gguf = write(tmp_path / "m.gguf", {key: data}, {key: kind}, arch="qwen35")
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 128}
    config = RawConfig({"num_attention_heads": 2, "linear_key_head_dim": 128} | sizes)
    hub = "model.layers.0.linear_attn.out_proj.weight"
    checkpoint = gguf_checkpoint(gguf, config)
    matrix = GgufBlocks(config).matrix(checkpoint, hub, (5, 512))
    assert matrix is not None
    with np.errstate(all="ignore"):  # such scales as bytes happen to be
        wanted = library.dequantize(data, kind).reshape(5, 2, 2, 128).swapaxes(1, 2).reshape(5, 512)
        np.testing.assert_array_equal(matrix.read(0, 5).dequantize(), wanted)
    stored = stored_packed([matrix], "out_proj")
    assert stored.packed
    assert stored.order is not None
    config.values["linear_num_key_heads"] = 4  # a key for each: nothing to gather
    matrix = GgufBlocks(config).matrix(gguf_checkpoint(gguf, config), hub, (5, 512))
    assert matrix is not None
    assert matrix.order is None


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_experts_of_blocks_are_read_one_by_one(tmp_path: Path, kind: Kind) -> None:
    gguf = converted(tmp_path / "m.gguf", "mixtral", kind=kind)
    config = gguf_config(gguf)
    checkpoint, found = gguf_checkpoint(gguf, config), find_format(config)
    assert found is not None
    packed = find_packed(checkpoint, found, build_model(config).weights()).packed
    experts = [key for key in packed if ".experts." in key]
    assert len(experts) == 2 * 8 * 3
    for key in experts:
        info = Checkpoint.open(DATA / "models" / "mixtral").tensors[key]
        wanted = library.dequantize(library.quantize(read_rows(info), kind), kind)
        np.testing.assert_array_equal(packed[key].read(0, len(wanted)).dequantize(), wanted)


@pytest.mark.parametrize("kind", [None, Kind.MXFP4])
def test_gate_and_up_of_gpt_oss_are_those_that_alternate(tmp_path: Path, kind: Kind | None) -> None:
    gguf = converted(tmp_path / "m.gguf", "gpt_oss", kind=kind, dtype=np.float32)
    model, checkpoint = open_model(gguf.file)
    hub = Checkpoint.open(DATA / "models" / "gpt_oss").tensors
    plan = plan_weights(model.weights(), checkpoint, ignorable=model.ignorable)
    weights = [weight for weight in plan.weights if ".experts." in weight.name]
    assert len(weights) == 2 * 4
    for weight in weights:
        found = []
        for part in weight.parts:
            packed = isinstance(part.tensor, Packed)
            assert packed == (kind is not None and not part.source.key.endswith(".bias"))
            if isinstance(part.tensor, Packed):
                found.append(part.tensor.read(0, part.tensor.shape[0]).dequantize())
            else:
                found.append(read_rows(part.tensor))
        (key,) = {source.key for source in weight.spec.sources}
        wanted = read_rows(hub[key])
        wanted = wanted if key.endswith("_bias") else wanted.swapaxes(1, 2)
        if "gate_up" in key:
            by_pair = wanted.reshape(len(wanted), -1, 2, *wanted.shape[2:])
            wanted = by_pair.swapaxes(1, 2).reshape(wanted.shape)
        wanted = wanted.reshape(weight.shape)
        if kind is not None and wanted.ndim > 1:
            wanted = library.dequantize(library.quantize(wanted, kind), kind)
        np.testing.assert_array_equal(np.concatenate(found), wanted)


def hub_blocks(gguf: Gguf, name: str, count: int) -> tuple[Array, Array]:
    """The blocks and scales of `count` matrices in MXFP4, in the hub's order: a byte holds two
    neighbours, where those of a GGUF file are 16 columns apart."""
    info = gguf.tensors[name]
    data = np.fromfile(info.file, np.uint8, info.nbytes, offset=info.offset)
    data = data.reshape(count, info.shape[1], -1, 17)
    codes = np.concatenate([data[..., 1:] & 15, data[..., 1:] >> 4], axis=-1)
    return codes[..., ::2] | codes[..., 1::2] << 4, data[..., 0]


def test_gpt_oss_in_mxfp4_has_the_weights_of_the_hub(device: Device, tmp_path: Path) -> None:
    gguf = converted(tmp_path / "m.gguf", "gpt_oss", kind=Kind.MXFP4)
    source, hub = DATA / "models" / "gpt_oss", tmp_path / "hub"
    config = json.loads((source / "config.json").read_text())
    count = config["num_local_experts"]
    infos = Checkpoint.open(source).tensors
    tensors = {key: read_rows(info) for key, info in infos.items() if len(info.shape) < 3}
    for layer in range(config["num_hidden_layers"]):
        gate, up, down = (
            hub_blocks(gguf, f"blk.{layer}.ffn_{part}_exps.weight", count)
            for part in ("gate", "up", "down")
        )
        for i, kind in enumerate(("blocks", "scales")):
            both = np.stack([gate[i], up[i]], axis=2).reshape(count, -1, *gate[i].shape[2:])
            key = f"model.layers.{layer}.mlp.experts"
            tensors[f"{key}.gate_up_proj_{kind}"] = both
            tensors[f"{key}.down_proj_{kind}"] = np.ascontiguousarray(down[i])
    hub.mkdir()
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    (hub / "config.json").write_text(json.dumps(config))
    save_file(tensors, hub / "model.safetensors")
    with device.scope():
        models = [open_model(path) for path in (gguf.file, hub)]
        ours, theirs = (load_weights(device, list(m.weights()), found) for m, found in models)
        experts = [name for name in theirs if ".experts." in name]
        assert [ours[name].dtype for name in experts] == ["mxfp4", "f32"] * 4
        for name in experts:
            for a, b in zip(ours[name].buffers, theirs[name].buffers, strict=True):
                np.testing.assert_array_equal(device.read(a, np.uint32), device.read(b, np.uint32))


def test_permuted_rows_of_blocks_are_read_as_on_the_hub(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    q = library.quantize(rng.standard_normal((64, 64), np.float32), Kind.Q8_0)
    k = library.quantize(rng.standard_normal((32, 64), np.float32), Kind.Q5_1)
    tensors = {"blk.0.attn_q.weight": permuted(q, 4), "blk.0.attn_k.weight": permuted(k, 2)}
    kinds = {"blk.0.attn_q.weight": Kind.Q8_0, "blk.0.attn_k.weight": Kind.Q5_1}
    gguf = write(tmp_path / "m.gguf", tensors, kinds)
    config = RawConfig({"num_attention_heads": 4, "num_key_value_heads": 2})
    checkpoint = gguf_checkpoint(gguf, config)
    for part, data, kind in (("q", q, Kind.Q8_0), ("k", k, Kind.Q5_1)):
        key = f"model.layers.0.self_attn.{part}_proj.weight"
        matrix = GgufBlocks(config).matrix(checkpoint, key, (len(data), 64))
        assert matrix is not None
        wanted = library.dequantize(data, kind)
        np.testing.assert_array_equal(matrix.read(0, len(data)).dequantize(), wanted)
        np.testing.assert_array_equal(matrix.read(9, 26).dequantize(), wanted[9:26])


def test_a_tensor_of_gate_and_up_is_taken_apart(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).standard_normal((3, 2 * 4, 8), np.float32)
    gguf = write(tmp_path / "m.gguf", {"blk.1.ffn_gate_up_exps.weight": whole}, arch="qwen3moe")
    config = RawConfig({"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 3})
    found = gguf_checkpoint(gguf, config).tensors
    assert len(found) == 6
    for expert, (gate, up) in enumerate(np.split(matrix, 2) for matrix in whole):
        key = f"model.layers.1.mlp.experts.{expert}"
        np.testing.assert_array_equal(read_rows(found[f"{key}.gate_proj.weight"]), gate)
        np.testing.assert_array_equal(read_rows(found[f"{key}.up_proj.weight"]), up)


def test_a_tensor_of_q_k_and_v_is_taken_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = {
        part: rng.standard_normal((rows, 8), np.float32)
        for part, rows in (("q", 16), ("k", 8), ("v", 8))
    }
    whole = np.concatenate([permuted(parts["q"], 4), permuted(parts["k"], 2), parts["v"]])
    tensors = {"blk.0.attn_qkv.weight": whole, "blk.0.attn_qkv.bias": whole[:, 0].copy()}
    gguf = write(tmp_path / "m.gguf", tensors)
    config = RawConfig({"num_attention_heads": 4, "num_key_value_heads": 2})
    found = gguf_checkpoint(gguf, config).tensors
    assert len(found) == 6
    for part, values in parts.items():
        key = f"model.layers.0.self_attn.{part}_proj"
        np.testing.assert_array_equal(read_rows(found[f"{key}.weight"]), values)
        np.testing.assert_array_equal(read_rows(found[f"{key}.bias"]), values[:, 0])
    gguf = write(tmp_path / "m.gguf", tensors | {"blk.0.attn_v.weight": parts["v"]})
    with pytest.raises(CheckpointError, match=r"v_proj.weight twice"):
        gguf_checkpoint(gguf, config)


def test_every_name_of_an_architecture_is_known(tmp_path: Path) -> None:
    """The names that the library would write for a model are those of its weights."""
    names = library.get_tensor_name_map(MODEL_ARCH.QWEN3, 2)
    model = build_model(RawConfig.open(DATA / "models" / "qwen3"))
    for source in (source for spec in model.weights() for source in spec.sources):
        own = names.get_name(source.key, try_suffixes=(".weight", ".bias"))
        assert own is not None
        gguf = write(tmp_path / "m.gguf", {own: np.ones(4, np.float32)}, arch="qwen3")
        config = RawConfig({"num_attention_heads": 4, "num_key_value_heads": 2})
        assert list(gguf_checkpoint(gguf, config).tensors) == [source.key]


def test_rope_scaling_is_read(tmp_path: Path) -> None:
    def yarn(writer: library.GGUFWriter) -> None:
        writer.add_rope_scaling_type(library.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    rope = gguf_config(converted(tmp_path / "m.gguf", "llama", yarn)).rope(16)
    assert (rope.kind, rope.scaling) == (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 32},
    )

    def own_factor(writer: library.GGUFWriter) -> None:
        yarn(writer)
        writer.add_rope_scaling_attn_factors(0.5)

    own = gguf_config(converted(tmp_path / "m.gguf", "llama", own_factor)).rope(16)
    assert np.allclose(rope_table(own, 9), rope_table(rope, 9) / 2)  # ggml's rope_yarn: a product

    def linear(writer: library.GGUFWriter) -> None:
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    rope = gguf_config(converted(tmp_path / "m.gguf", "llama", linear)).rope(16)
    assert (rope.kind, rope.scaling) == ("linear", {"factor": 2.0})


def llama3_factors(head_dim: int, theta: float, factor: float, original: float) -> Array:
    """How much slower each pair turns, by Llama 3's own rule (apply_scaling of its model.py)."""
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * theta ** (i / head_dim)
        if wave < original / 4:
            factors.append(1.0)
        elif wave > original:
            factors.append(factor)
        else:
            smooth = (original / wave - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_the_scaling_of_llama_3_is_found_in_its_factors(tmp_path: Path) -> None:
    def opened(factors: Array) -> RawConfig:
        def add(writer: library.GGUFWriter) -> None:
            for key, value in (("context_length", 131072), ("embedding_length", 256)):
                writer.add_uint32(f"llama.{key}", value)
            for key in ("block_count", "feed_forward_length"):
                writer.add_uint32(f"llama.{key}", 1)
            writer.add_head_count(2)
            writer.add_rope_freq_base(500000.0)
            writer.add_layer_norm_rms_eps(1e-5)

        tensors = {"token_embd.weight": np.ones((4, 256), np.float32), "rope_freqs.weight": factors}
        gguf = write(tmp_path / "m.gguf", tensors, add=add)
        config = gguf_config(gguf)
        assert "rope_freqs.weight" not in gguf_checkpoint(gguf, config).tensors
        return config

    scaling = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0):
        rope = opened(llama3_factors(128, 5e5, factor, 8192)).rope(128)
        assert (rope.kind, rope.scaling) == ("llama3", scaling | {"factor": factor})
    assert opened(np.ones(64, np.float32)).rope(128).kind == "default"
    with pytest.raises(UnsupportedError, match="only one that is implemented"):
        opened(llama3_factors(128, 5e5, 8.0, 4096))
    with pytest.raises(CheckpointError, match="rope_freqs"):
        opened(np.ones(63, np.float32))


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda writer: writer.add_sliding_window(8), "llama.attention.sliding_window is not"),
        (lambda writer: writer.add_logit_scale(2.0), "llama.logit_scale is not implemented"),
        (lambda writer: writer.add_rope_scaling_type(library.RopeScalingType.LONGROPE), "longrope"),
        (lambda writer: writer.add_rope_scaling_attn_factors(2.0), r"scaling\.attn_factor"),
        (lambda writer: writer.add_rope_scaling_yarn_attn_factor(2.0), "yarn_attn_factor"),
    ],
)
def test_models_are_refused_by_name(tmp_path: Path, add: Any, message: str) -> None:
    gguf = converted(tmp_path / "m.gguf", "llama", add)
    with pytest.raises(UnsupportedError, match=message):
        gguf_config(gguf)


@pytest.mark.parametrize(
    ("name", "add", "message"),
    [
        ("mixtral", lambda w: w.add_expert_weights_norm(False), "expert_weights_norm = False"),
        (
            "qwen3_moe",
            lambda w: w.add_expert_gating_func(library.ExpertGatingFuncType.SIGMOID),
            "expert_gating_func = 2",
        ),
        ("qwen3_moe", lambda w: w.add_expert_weights_scale(2.0), "expert_weights_scale = 2"),
        ("qwen3_moe", lambda w: w.add_expert_group_count(4), "expert_group_count is not"),
        ("qwen3", lambda w: w.add_expert_count(4), "expert_count = 4"),
        ("qwen2", lambda w: w.add_sliding_window(4096), "qwen2.attention.sliding_window is not"),
        ("glm4_moe", lambda w: w.add_expert_group_count(4), "n_group = 4"),
        ("granite", lambda w: w.add_rope_scaling_finetuned(False), "finetuned = False"),
        ("nemotron", lambda w: w.add_ssm_conv_kernel(4), "nemotron.ssm.conv_kernel is not"),
    ],
)
def test_variants_of_architectures_are_refused_by_name(
    tmp_path: Path, name: str, add: Any, message: str
) -> None:
    def late(writer: library.GGUFWriter) -> None:
        for data in writer.kv_data:
            data.pop("mixtral.expert_weights_norm", None)
            data.pop("llama.expert_weights_norm", None)
            data.pop("qwen3.expert_count", None)
        add(writer)

    gguf = converted(tmp_path / "m.gguf", name, late)
    with pytest.raises(UnsupportedError, match=message):
        open_model(gguf.file)


def test_sizes_of_a_delta_net_are_asked_for(tmp_path: Path) -> None:
    gguf = converted(tmp_path / "m.gguf", "qwen3_5_text")
    gguf.metadata["qwen35.ssm.inner_size"] //= 2
    with pytest.raises(CheckpointError, match="not of 4 heads of 12"):
        gguf_checkpoint(gguf, gguf_config(gguf))
    del gguf.metadata["qwen35.ssm.group_count"]
    with pytest.raises(UnsupportedError, match="lacks 'linear_num_key_heads'"):
        gguf_config(gguf)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window_pattern", 2, "must say of each of 4 layers"),
        ("attention.sliding_window_pattern", np.ones(3, bool), "must say of each of 4 layers"),
        ("attention.sliding_window_pattern", np.ones(4, bool), "some of either"),
        ("attention.head_count_kv", np.array([2, 1, 1, 2]), r"\[2, 1, 1, 2\] is not implemented"),
        ("attention.head_count_kv", np.array([2, 1, 1]), "are not 4 numbers"),
        ("attention.value_length", 8, "value_length = 8"),
        ("attention.value_length_swa", 40, "value_length_swa = 40"),
        ("rope.dimension_count", 20, "dimension_count = 20"),
        ("rope.dimension_count_swa", 4, "dimension_count_swa = 4"),
        ("rope.scaling.type", "linear", "type = 'linear'"),
        ("feed_forward_length", np.array([64, 64, 128, 64]), "or twice as much in the last 2"),
        ("feed_forward_length", np.array([64, 128, 128, 128]), "or twice as much in the last 2"),
        ("feed_forward_length", np.array([64.0] * 4), "are not 4 numbers"),
    ],
)
def test_what_gemma_4_says_of_layers_is_checked(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    gguf = converted(tmp_path / "m.gguf", "gemma4")
    gguf.metadata[f"gemma4.{key}"] = value
    with pytest.raises(InferError, match=message):
        gguf_config(gguf)


@pytest.mark.parametrize("factors", [[1.0, 1e30, 1.0, 1e30], [1.0, 8.0, 8.0, 8.0], None])
def test_pairs_that_do_not_turn_are_asked_for(tmp_path: Path, factors: list[float] | None) -> None:
    gguf = converted(tmp_path / "m.gguf", "gemma4")
    gguf.metadata["gemma4.attention.key_length"] = 8
    gguf.metadata["gemma4.attention.value_length"] = 8
    del gguf.tensors["rope_freqs.weight"]
    if factors is not None:
        name = "rope_freqs.weight"
        other = write(tmp_path / "o.gguf", {name: np.array(factors, np.float32)})
        gguf.tensors[name] = other.tensors[name]
    with pytest.raises(InferError, match=r"rope_freqs\.weight"):
        gguf_config(gguf)


@pytest.mark.usefixtures("as_short")
@pytest.mark.parametrize("beta", [None, "0.5", 1, [0.5]])
def test_numbers_of_xielu_are_asked_for(tmp_path: Path, beta: Any) -> None:
    gguf = converted(tmp_path / "m.gguf", "apertus")
    gguf.metadata["xielu.beta"] = beta
    with pytest.raises(CheckpointError, match=r"xielu\.beta are not 2 numbers"):
        gguf_checkpoint(gguf, gguf_config(gguf))
    gguf.metadata["xielu.beta"] = 0.25  # of all layers
    found = gguf_checkpoint(gguf, gguf_config(gguf)).tensors
    assert read_flat(found["model.layers.1.mlp.act_fn.beta"], 0, 1) == 0.25


def test_experts_without_their_number_are_damage(tmp_path: Path) -> None:
    gguf = converted(tmp_path / "m.gguf", "qwen3_moe")
    gguf.metadata["qwen3moe.expert_count"] = 4
    with pytest.raises(CheckpointError, match="holds 8 experts, but the metadata say 4"):
        gguf_checkpoint(gguf, gguf_config(gguf))


def test_what_differs_from_layer_to_layer_is_refused(tmp_path: Path) -> None:
    def add(writer: library.GGUFWriter) -> None:
        writer.add_block_count(2)
        writer.add_head_count([4, 8])

    gguf = write(tmp_path / "m.gguf", {"a": np.ones(4, np.float32)}, add=add)
    with pytest.raises(UnsupportedError, match="head_count differ from layer to layer"):
        gguf_config(gguf)


@pytest.mark.parametrize("heads", [[0, 2, 4], [0, 0, 0], [0, 2.5, 0], ["", "", ""]])
def test_heads_that_differ_from_layer_to_layer_are_refused(
    tmp_path: Path, heads: list[Any]
) -> None:
    gguf = converted(tmp_path / "m.gguf", "lfm2")
    gguf.metadata["lfm2.attention.head_count_kv"] = np.array(heads)
    with pytest.raises(UnsupportedError, match="head_count_kv"):
        gguf_config(gguf)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    gguf = write(tmp_path / "m.gguf", {"a": np.ones(4, np.float32)}, arch="mamba")
    with pytest.raises(UnsupportedError, match="'mamba'"):
        gguf_config(gguf)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(  # not Qwen3: its head_dim is not read there
    "name", ["llama", "qwen2", "qwen3_5_text", "qwen3_5_moe_text"]
)
def test_transformers_reads_the_same_model(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    size = published(name).values["vocab_size"]

    def numbered(writer: library.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen35")
        writer.add_token_list([f"{i}" for i in range(size)])
        writer.add_token_types([1] * size)
        writer.add_token_merges([])

    add = numbered if name.startswith("qwen3_5") else vocabulary
    gguf = converted(tmp_path / "m.gguf", name, add)
    config = gguf_config(gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype="float32"
    )
    for key, info in gguf_checkpoint(gguf, config).tensors.items():
        if ".experts." not in key:  # which it has in one tensor
            rtol = 1e-6 if key.endswith("A_log") else 0
            wanted = model.state_dict()[key].numpy()
            np.testing.assert_allclose(read_rows(info), wanted, rtol=rtol, atol=0)
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert np.float32(getattr(model.config, key)) == np.float32(config.values[key])


# Tokenizers


def vocabulary(writer: library.GGUFWriter, name: str = "llama3", pre: str = "llama-bpe") -> None:
    """The tokens and merges of a stored tokenizer, of byte-level BPE."""
    backend = json.loads((DATA / "text" / name / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    added = {token["content"]: 3 if token["special"] else 4 for token in backend["added_tokens"]}
    tokens += [token for token in added if token not in backend["model"]["vocab"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([added.get(token, 1) for token in tokens])
    merges = backend["model"]["merges"]
    writer.add_token_merges([x if isinstance(x, str) else " ".join(x) for x in merges])


def text_of(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DATA / "text" / name / "tokenizer.json"))


SAMPLES: Sequence[str] = [
    *(entry["text"] for entry in TEXTS["llama3"]["encode"]),
    "In 2024 there were 12345 <|eot_id|> dogs; it'S 3.14159",
    "e\u0301 ﬁ \u00a0 x",
    "\n\n  \n x\t\ty   z",
]


def test_a_byte_level_tokenizer_is_read(tmp_path: Path) -> None:
    def add(writer: library.GGUFWriter) -> None:
        vocabulary(writer, "chatml", "gpt-2")
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages[0].content }}")

    tokenizer = gguf_tokenizer(write(tmp_path / "m.gguf", add=add))
    wanted = text_of("chatml")
    wanted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wanted.normalizer = None
    for text in SAMPLES:
        ids = wanted.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, False) == wanted.decode(ids, skip_special_tokens=False)
    assert tokenizer.special_tokens == {"eos_token": wanted.id_to_token(2)}
    assert tokenizer.eos_token_ids == {0, 2}  # <|endoftext|> ends it too
    assert tokenizer.bos_token_id is None
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
    assert_texts_keep_their_tokens(tokenizer, SAMPLES)


@pytest.mark.parametrize("begins", [False, True])
def test_a_chat_begins_with_bos_where_a_text_does(tmp_path: Path, begins: bool) -> None:
    """Also where the template does not write it, as in llama.cpp (server-common.cpp tokenizes what
    the template gives with its special tokens; chat.cpp takes the template's own BOS away)."""

    def add(writer: library.GGUFWriter) -> None:
        vocabulary(writer)
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(begins)

    tokenizer = gguf_tokenizer(write(tmp_path / "m.gguf", add=add))
    chat = [{"role": "user", "content": "a dog"}]
    bare = tokenizer.encode("a dog", add_special_tokens=False)
    written = "{{ bos_token }}{{ messages[0].content }}"
    assert tokenizer.encode_chat(chat, template=written) == [0, *bare]
    assert tokenizer.encode_chat(chat, template="{{ messages[0].content }}") == [0] * begins + bare


@pytest.mark.live
@pytest.mark.parametrize(
    "pre", ["llama-bpe", "qwen2", "qwen35", "tekken", "gpt-2", "dbrx", "gpt-4o"]
)
def test_text_is_split_as_transformers_does(tmp_path: Path, pre: str) -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    gguf = write(tmp_path / "m.gguf", add=lambda writer: vocabulary(writer, "llama3", pre))
    architecture, values, _ = get_gguf_tokenizer(str(tmp_path / "m.gguf"))
    wanted, _ = convert_gguf_tokenizer(architecture, values)
    tokenizer = gguf_tokenizer(gguf)
    for text in SAMPLES:
        # Qwen's own tokenizer.json normalises text; what transformers makes of GGUF does not.
        normal = unicodedata.normalize("NFC", text) if "qwen" in pre else text
        ids = wanted.encode(normal, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("lfm2", ["It", "'s", " ", "123", "45", " dogs", "!\n"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " dogs", "!\n"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " dogs", "!\n"]),
        ("qwen35", ["It", "'s", " ", "1", "2", "3", "4", "5", " dogs", "!\n"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " dogs", "!\n"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " dogs", "!", "\n"]),
        ("gpt-2", ["It", "'s", " 12345", " dogs", "!", "\n"]),
        ("command-r", ["It", "'s", " ", "1", "2", "3", "4", "5", " dogs", "!", "\n"]),
        ("gpt-4o", ["It's", " ", "123", "45", " dogs", "!\n"]),
        ("seed-coder", ["It", "'s", " ", "1", "2", "3", "4", "5", " dogs", "!", "\n"]),
        ("hunyuan", ["It", "'s", " ", "1", "2", "3", "4", "5", " dogs", "!\n"]),
        ("hunyuan-dense", ["It", "'s", " ", "123", "45", " dogs", "!\n"]),
    ],
)
def test_text_is_split_before_merging(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    gguf = write(tmp_path / "m.gguf", add=lambda writer: vocabulary(writer, "llama3", pre))
    backend = gguf_tokenizer(gguf)._backend
    assert backend.pre_tokenizer is not None
    found = backend.pre_tokenizer.pre_tokenize_str("It's 12345 dogs!\n")
    decode = decoders.ByteLevel().decode
    assert [decode([piece]) for piece, _ in found] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        (
            "deepseek-llm",
            [" It", "'", "s", " ", "क", "1", "2", " γ", "Ａ", "न", "，", "中文", "$", " "],
        ),
        (
            "deepseek-coder",
            [" It", "'", "s", " ", "क", "1", "2", " γＡ", "न", "，", "中文", "$ "],
        ),
    ],
)
def test_text_is_split_as_the_first_deepseek_does(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    """By the splits of their tokenizer.json, each of which cuts what the one before it has left:
    to the former wide letters and $ are symbols."""
    gguf = write(tmp_path / "m.gguf", add=lambda writer: vocabulary(writer, "llama3", pre))
    backend = gguf_tokenizer(gguf)._backend
    assert backend.pre_tokenizer is not None
    decode = decoders.ByteLevel().decode
    found = backend.pre_tokenizer.pre_tokenize_str(" It's क12 γＡन，中文$ \n")
    assert [decode([piece]) for piece, _ in found] == [*pieces, "\n"]


@pytest.mark.parametrize("stored", ["merges", "scores", "order", "gemma4"])
def test_a_sentencepiece_tokenizer_is_read(tmp_path: Path, stored: str) -> None:
    wanted = text_of("mistral")
    if stored == "gemma4":  # as transformers' GemmaTokenizer has it
        wanted.normalizer = normalizers.Replace(" ", "▁")
        unspaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        wanted.decoder = decoders.Sequence(unspaced)
    backend = json.loads(wanted.to_str())["model"]
    tokens = sorted(backend["vocab"], key=backend["vocab"].get)
    merges = [x if isinstance(x, str) else " ".join(x) for x in backend["merges"]]

    def kind(token: str) -> int:
        if token.startswith("<0x"):
            return 6
        return {"<unk>": 2, "<s>": 3, "</s>": 3}.get(token, 1)

    def add(writer: library.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4" if stored == "gemma4" else "llama")
        writer.add_token_list(tokens)
        writer.add_token_types([kind(token) for token in tokens])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if stored in ("merges", "gemma4"):
            writer.add_token_merges(merges)
        elif stored == "order":
            writer.add_token_scores([0.0] * len(tokens))
        else:  # as in SentencePiece, the later merged the lower
            rank = {merge.replace(" ", ""): -float(i) for i, merge in enumerate(merges)}
            writer.add_token_scores([rank.get(token, -1e6) for token in tokens])

    arch = {"order": "gemma2", "gemma4": "gemma4"}.get(stored, "llama")
    tokenizer = gguf_tokenizer(write(tmp_path / "m.gguf", add=add, arch=arch))
    reference = Tokenizer(wanted, special_tokens={"bos_token": "<s>"})  # no second BOS
    for text in SAMPLES:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == wanted.decode(ids)
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    for ids in TEXTS["mistral"]["decode"]:
        assert tokenizer.decode(ids["ids"]) == reference.decode(ids["ids"])
    assert tokenizer.bos_token_id == 1
    assert len(tokenizer.byte_token_ids) == 256
    assert_texts_keep_their_tokens(tokenizer, SAMPLES)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["a", "<|end|>", "<|return|>", "<|call|>"], {2, 3}),  # gpt-oss: it ends one message
        (["a", "<|end|>", "<|return|>"], {1, 2}),
        (["a", "<|end|>"], {1}),  # Phi-3
    ],
)
def test_what_ends_a_turn(tmp_path: Path, tokens: list[str], ends: set[int]) -> None:
    def add(writer: library.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-4o")
        writer.add_token_list([*tokens, "b", "ab"])
        writer.add_token_types([3 if "|" in token else 1 for token in tokens] + [1, 1])
        writer.add_token_merges(["a b"])
        writer.add_eot_token_id(1)

    assert gguf_tokenizer(write(tmp_path / "m.gguf", add=add)).eos_token_ids == ends


@pytest.mark.parametrize("of", [1, 3, 4])  # normal, control, user defined
def test_the_type_of_what_ends_a_turn_does_not_matter(tmp_path: Path, of: int) -> None:
    """llama.cpp overrides it (llama-vocab.cpp, special_eog_ids)."""
    ends = ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>"]
    ends += [
        "[EOT]",
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",
        "[e~[",
        "<|flush|>",
        "<|calls|>",
    ]
    tokens = [*ends, "<|end|>", "</s>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "a", "b"]

    def add(writer: library.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-4o")
        writer.add_token_list([*tokens, "ab"])
        writer.add_token_types([of] * (len(tokens) - 2) + [1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(0)

    tokenizer = gguf_tokenizer(write(tmp_path / "m.gguf", add=add))
    html = tokens.index("</s>")
    assert tokenizer.eos_token_ids == {*range(len(ends)), *([html] if of == 3 else [])}
    for i, token in enumerate(tokens[:-2]):
        if token not in ("</s>", "<|end|>"):
            assert tokenizer.encode(f"ab{token}b") == [len(tokens), i, tokens.index("b")]
            assert not tokenizer.is_shown(i)


@pytest.mark.parametrize(
    ("arch", "name", "strips"),
    [
        ("phi3", "Phi 3.5 Mini Instruct", True),
        ("phi3", None, True),
        ("llama", "Phi-3-mini-4k-instruct", True),  # converted to Llama's names
        ("llama", "my Phi3 tune", True),
        ("llama", "Mistral", False),
    ],
)
def test_the_tokens_of_phi3_take_the_space_behind_them(
    tmp_path: Path, arch: str, name: str | None, strips: bool
) -> None:
    """Tokens of Phi-3 strip spaces as in its tokenizer.json. A GGUF file does not say so; llama.cpp
    goes by the name."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "\n", "<|endoftext|>", "<|user|>", "<|end|>"]

    def add(writer: library.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([2, 3, 4, 1, 1, 1, 1, 3, 3, 3])
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(False)
        if name is not None:
            writer.add_name(name)

    gguf = write(tmp_path / "m.gguf", add=add, arch=arch)
    tokenizer = gguf_tokenizer(gguf)
    wanted = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    for token in tokens[:3] + tokens[7:]:
        rstrip = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
        wanted.add_tokens([tokenizers.AddedToken(token, normalized=False, rstrip=rstrip)])
    for text in ("<|user|>\n a<|end|>\n", "a<|endoftext|> \na", "<s> a</s> \n\na", "<|end|>  "):
        assert tokenizer.encode(text) == wanted.encode(text).ids
    assert (6 in tokenizer.encode("<|user|>\na")) == (not strips)
    assert 6 in tokenizer.encode("<|endoftext|>\na")


def test_what_ends_a_turn_of_gemma_4(tmp_path: Path) -> None:
    """The ids of its generation_config.json, of which a file names one or two."""

    def add(writer: library.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(["<eos>", "<turn|>", "<|tool_response>", "<bos>", "a", "b", "ab"])
        writer.add_token_types([1, 3, 4, 3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(1)
        writer.add_bos_token_id(3)

    tokenizer = gguf_tokenizer(write(tmp_path / "m.gguf", add=add, arch="gemma4"))
    assert tokenizer.eos_token_ids == {0, 1, 2}
    assert tokenizer.encode("ab<turn|>") == [3, 6, 1]


def test_special_tokens_and_templates_are_read(tmp_path: Path) -> None:
    def add(writer: library.GGUFWriter) -> None:
        vocabulary(writer)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(4)
        writer.add_add_eos_token(True)
        writer.add_chat_template(
            [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
        )

    tokenizer = gguf_tokenizer(write(tmp_path / "m.gguf", add=add))
    bare = tokenizer.encode("a dog", add_special_tokens=False)
    assert tokenizer.encode("a dog") == [0, *bare, 1]  # llama-bpe has BOS unless the file says no
    assert tokenizer.eos_token_ids == {1, 2, 3, 4}  # <|eom_id|> and <|eot_id|> without being named
    assert tokenizer.templates == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_string("tokenizer.ggml.model", "t5"), "'t5'"),
        (lambda w: vocabulary(w, pre="default"), "'default'"),
        (lambda w: w.add_string("tokenizer.ggml.model", "llama"), "no tokenizer.ggml.tokens"),
        (lambda w: (vocabulary(w), w.add_bos_token_id(9999)), "9999 is not one of"),
        (lambda w: (vocabulary(w), w.add_string("tokenizer.ggml.bos_token_id", "1")), "no int"),
        (lambda w: None, "None"),
        (
            lambda w: (w.add_tokenizer_model("gemma4"), w.add_token_list(["a"])),
            "no tokenizer.ggml.merges",
        ),
    ],
)
def test_tokenizers_are_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    gguf = write(tmp_path / "m.gguf", add=change)
    with pytest.raises(TokenizerError, match=message):
        gguf_tokenizer(gguf)


@pytest.mark.parametrize("value", [1, 0.5, True, "xyz", ["a", "b"]])
def test_there_is_a_type_for_each_token(tmp_path: Path, value: Any) -> None:
    gguf = write(tmp_path / "m.gguf", add=vocabulary)
    gguf.metadata["tokenizer.ggml.token_type"] = value
    with pytest.raises(TokenizerError, match="token_type are not"):
        gguf_tokenizer(gguf)


def test_a_token_that_is_no_word_is_damage(tmp_path: Path) -> None:
    """Every cut of a token may be a merge: a million of a million characters."""

    def add(writer: library.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b" * 10**6])
        writer.add_token_types([1, 1])
        writer.add_token_scores([0.0, 0.0])

    with pytest.raises(TokenizerError, match="a token of 1,000,000 characters"):
        gguf_tokenizer(write(tmp_path / "m.gguf", add=add))


def test_merges_outside_of_the_vocabulary_are_damage(tmp_path: Path) -> None:
    def add(writer: library.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a b"])

    gguf = write(tmp_path / "m.gguf", add=add)
    with pytest.raises(TokenizerError, match="'a' and 'b' are merged"):
        gguf_tokenizer(gguf)
    gguf.metadata["tokenizer.ggml.merges"] = ["a"]
    with pytest.raises(TokenizerError, match="not all pairs"):
        gguf_tokenizer(gguf)
