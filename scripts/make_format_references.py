"""Make the quantised matrices under tests/data/formats, packed and unpacked by the formats' own
libraries.

    python scripts/make_format_references.py             # all cases
    python scripts/make_format_references.py gptq_4bit   # or some

Each folder there holds what a model of a single module would: config.json with what the format
writes into it, model.safetensors with the module's tensors, and values.npz with the matrix that the
library makes of them, float32 [rows, columns] (rounded to the dtype that the library computes in,
which is float32 unless its name says otherwise).

Needs the extra `reference`, and for the formats, installed with --no-deps: auto_gptq, auto-round,
autoawq, mlx with mlx-cpu, compressed-tensors with loguru, bitsandbytes.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "formats"
ROWS, COLUMNS = 48, 128
GPTQ_ROWS = 64  # packed along the rows, in multiples of 32
MODULE = "model.layers.0.self_attn.q_proj"

Tensors = dict[str, torch.Tensor]
# The quantisation in config.json, the tensors of the module, and the matrix.
Result = tuple[dict[str, Any], Tensors, torch.Tensor]


def weights(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    """Values whose spread differs from row to row and from column to column."""
    spread = torch.rand(rows, 1) * 0.1 + torch.rand(1, columns) * 0.02
    return torch.randn(rows, columns) * spread + torch.randn(rows, 1) * 0.02


def module_of(package: str, name: str) -> types.ModuleType:
    """Import a module of a package without running the package's __init__, which imports much that
    is not needed here."""
    root = importlib.util.find_spec(package)
    assert root is not None
    assert root.submodule_search_locations is not None
    path = Path(root.submodule_search_locations[0], *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"{package}_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def affine(
    w: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, exact in f16, and zero points of each group of columns [rows, groups]."""
    parts = w.reshape(len(w), -1, group)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / (2**bits - 1)).half().float()
    # A zero point of 0 cannot be stored less one.
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    return scales, torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros


def gptq(
    bits: int, group: int, symmetric: bool, act_order: bool, v2: bool = False, dtype: str = "half"
) -> Result:
    w = weights(GPTQ_ROWS)
    size = COLUMNS if group == -1 else group
    index = torch.arange(COLUMNS) // size
    if act_order:
        index = index[torch.randperm(COLUMNS)]
    order = torch.argsort(index, stable=True)
    scales, zeros = affine(w[:, order], bits, size, symmetric)
    layer = module_of("auto_gptq", "nn_modules.qlinear.qlinear_cuda").QuantLinear(
        bits, size, COLUMNS, GPTQ_ROWS, bias=True, weight_dtype=torch.float32
    )
    linear = torch.nn.Linear(COLUMNS, GPTQ_ROWS)
    linear.weight.data, linear.bias.data = w, torch.zeros(GPTQ_ROWS)
    layer.pack(linear, scales, zeros, index.int())
    values = layer(torch.eye(COLUMNS)).T
    tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    tensors["scales"] = getattr(tensors["scales"], dtype)()
    if v2:  # the zero points themselves
        one = torch.tensor(sum(1 << i for i in range(0, 32, bits)), dtype=torch.int32)
        tensors["qzeros"] = tensors["qzeros"] + one
    tensors["bias"] = layer.bias.half()
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": act_order,
        "damp_percent": 0.1,
        "true_sequential": True,
    } | ({"checkpoint_format": "gptq_v2"} if v2 else {})
    return {"quantization_config": config}, tensors, values


def auto_round() -> Result:
    utils = types.ModuleType("auto_round.utils")  # the real module would import far more
    utils.get_packing_device = lambda device: "cpu"  # type: ignore[attr-defined]
    bits = module_of("auto_round", "utils.bit_packing")
    sys.modules |= {"auto_round.utils": utils, "auto_round.utils.bit_packing": bits}
    sys.modules["auto_round"] = types.ModuleType("auto_round")
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    w = weights(GPTQ_ROWS)
    scales, zeros = affine(w, 4, 64, symmetric=False)
    linear = torch.nn.Linear(COLUMNS, GPTQ_ROWS, bias=False)
    linear.weight.data = w
    layer = QuantLinear(4, 64, COLUMNS, GPTQ_ROWS, bias=False)
    layer.pack(linear, scales, zeros)
    tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    layer.scales = layer.scales.float()
    config = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 64,
        "sym": False,
        "data_type": "int",
        "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
    }
    return {"quantization_config": config}, tensors, layer(torch.eye(COLUMNS)).T


def awq(group: int) -> Result:
    w = weights()
    size = COLUMNS if group == -1 else group
    scales, zeros = affine(w, 4, size, symmetric=False)
    spread_scales, spread_zeros = (x.repeat_interleave(size, 1) for x in (scales, zeros))
    codes = (w / spread_scales + spread_zeros).round().clamp(0, 15).int().T
    # The order of AutoAWQ's WQLinear_GEMM.from_linear, which needs a GPU.
    nibbles = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(x: torch.Tensor) -> torch.Tensor:
        words = torch.zeros(x.shape[0], x.shape[1] // 8, dtype=torch.int32)
        for i, column in enumerate(nibbles):
            words |= x[:, column::8].int() << (4 * i)
        return words

    tensors = {"qweight": pack(codes), "qzeros": pack(zeros.T), "scales": scales.T.contiguous()}
    unpacked = module_of("awq", "utils.packing_utils").dequantize_gemm(
        tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, size
    )
    tensors["scales"] = tensors["scales"].half()
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return {"quantization_config": config}, tensors, unpacked.T


def mlx(bits: int, group: int, mode: str = "affine", dtype: str = "float32") -> Result:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    w = mx.array(weights(16).numpy()).astype(getattr(mx, dtype))
    names = ("weight", "scales", "biases")
    arrays = mx.quantize(w, group_size=group, bits=bits, mode=mode)
    wide = [x if x.dtype in (mx.uint8, mx.uint32) else x.astype(mx.float32) for x in arrays]
    values = mx.dequantize(
        *wide, group_size=group, bits=bits, mode=mode, dtype=mx.float32
    )  # in float32, whatever the scales are
    tensors = {
        name: torch.from_numpy(np.array(x)).to(
            getattr(torch, dtype) if mx.issubdtype(y.dtype, mx.floating) else None
        )
        for name, x, y in zip(names, wide, arrays, strict=False)
    }
    size = {"group_size": group, "bits": bits} | ({} if mode == "affine" else {"mode": mode})
    # The module's own size counts, not the one for all.
    config = {"group_size": 64, "bits": 4, MODULE: size, "lm_head": False}
    return {"quantization": config}, tensors, torch.from_numpy(np.array(values))


def compressed(
    layout: str,
    bits: int = 8,
    kind: str = "int",
    strategy: str = "channel",
    symmetric: bool = True,
    dtype: str = "float32",
    **more: Any,
) -> Result:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "dynamic": False,
    } | more
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = weights()
    if strategy == "group":
        parts = w.reshape(ROWS, -1, args["group_size"])
        low, high = parts.amin(2), parts.amax(2)
    elif strategy == "block":
        height, width = args["block_structure"]
        padded = torch.nn.functional.pad(w, (0, -COLUMNS % width, 0, -ROWS % height))
        parts = padded.reshape(-(-ROWS // height), height, -1, width)
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    elif strategy == "channel":
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    else:
        low, high = w.amin().reshape(1), w.amax().reshape(1)
    scale, zero = calculate_qparams(low, high, scheme.weights)
    state = {"weight": w, "weight_scale": scale.to(getattr(torch, dtype))}
    if not symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(state, scheme)
    exact = tensors | {"weight_scale": tensors["weight_scale"].float()}
    values = compressor.decompress(exact, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": args,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return {"quantization_config": config}, tensors, values


def compressed_fp4(layout: str, preset: str) -> Result:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme, w = preset_name_to_scheme(preset, ["Linear"]), weights()
    low, high = ((parts := w.reshape(ROWS, -1, scheme.weights.group_size)).amin(2), parts.amax(2))
    whole = generate_gparam(w.amin(), w.amax()) if preset == "NVFP4" else None
    scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=whole)
    state = {"weight": w, "weight_scale": scale}
    state |= {} if whole is None else {"weight_global_scale": whole.reshape(1)}
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(state, scheme)
    values = dequantize(
        unpack_fp4_from_uint8(tensors["weight_packed"], ROWS, COLUMNS, torch.float32),
        compressor._decompress_scale(tensors["weight_scale"], torch.float32),
        args=scheme.weights,
        global_scale=tensors.get("weight_global_scale"),
        dtype=torch.float32,
    )
    groups = {"group_0": scheme.model_dump(mode="json") | {"format": layout}}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    return {"quantization_config": config}, tensors, values


def fp8(block: tuple[int, int] | None, dtype: str = "float32") -> Result:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    w = weights()
    height, width = block or (ROWS, COLUMNS)
    parts = w.reshape(ROWS // height, height, COLUMNS // width, width)
    scale = parts.abs().amax((1, 3)) / 448
    if dtype == "float8_e8m0fnu":
        scale = scale.log2().ceil().exp2()
    scale = scale.to(getattr(torch, dtype))
    spread = scale.float().repeat_interleave(height, 0).repeat_interleave(width, 1)
    code = (w / spread).to(torch.float8_e4m3fn)
    # Every code once, NaN left out.
    codes = torch.arange(256, dtype=torch.uint8)
    code.view(torch.uint8)[:2] = torch.where(codes & 127 == 127, 0, codes).reshape(2, -1)
    values = Fp8Dequantize(None)._dequantize_one(code, scale, output_dtype=torch.float32)
    tensors = {"weight": code, "weight_scale_inv": scale if block else scale.reshape(())}
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block) if block else None,
    }
    return {"quantization_config": config}, tensors, values


def mxfp4() -> Result:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, rows, groups = 2, 24, 4
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (experts, rows, groups), dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensors = {"weight_blocks": blocks, "weight_scales": scales}
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return {"quantization_config": config}, tensors, values.transpose(1, 2).reshape(-1, groups * 32)


def nf4(double: bool) -> Result:
    from bitsandbytes import functional

    w = weights(160 if double else 16)  # more blocks than the 256 that share a scale's scale
    packed, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=double)
    values = functional.dequantize_4bit(packed, state)
    parts = {f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": double,
    }
    return {"quantization_config": config}, {"weight": packed} | parts, values


def int8() -> Result:
    from bitsandbytes import functional

    codes, scales, _ = functional.int8_vectorwise_quant(weights(16).half())
    values = functional.int8_vectorwise_dequant(codes, scales)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"quantization_config": config}, tensors, values


CASES: dict[str, Callable[[], Result]] = {
    "gptq_4bit": lambda: gptq(4, 64, symmetric=True, act_order=False),
    "gptq_4bit_act_order": lambda: gptq(4, 32, symmetric=True, act_order=True),
    "gptq_4bit_zeros": lambda: gptq(4, 64, symmetric=False, act_order=True),
    "gptq_4bit_v2": lambda: gptq(4, 64, symmetric=False, act_order=False, v2=True),
    "gptq_8bit": lambda: gptq(8, -1, symmetric=True, act_order=False, dtype="float"),
    "gptq_8bit_zeros": lambda: gptq(8, 32, symmetric=False, act_order=False),
    "gptq_3bit_zeros": lambda: gptq(3, 64, symmetric=False, act_order=False),
    "gptq_2bit": lambda: gptq(2, 64, symmetric=True, act_order=False),
    "auto_round": auto_round,
    "awq": lambda: awq(32),
    "awq_row": lambda: awq(-1),
    **{
        f"mlx_{bits}bit": lambda bits=bits, group=group: mlx(bits, group)
        for bits, group in ((2, 32), (3, 64), (4, 64), (5, 32), (6, 128), (8, 64))
    },
    "mlx_4bit_f16": lambda: mlx(4, 64, dtype="float16"),
    "mlx_4bit_bf16": lambda: mlx(4, 32, dtype="bfloat16"),
    "mlx_mxfp4": lambda: mlx(4, 32, "mxfp4"),
    "mlx_nvfp4": lambda: mlx(4, 16, "nvfp4"),
    "mlx_mxfp8": lambda: mlx(8, 32, "mxfp8"),
    "compressed_int4": lambda: compressed("pack-quantized", 4, strategy="group", group_size=64),
    "compressed_int4_bf16": lambda: compressed(
        "pack-quantized", 4, strategy="group", group_size=128, dtype="bfloat16"
    ),
    "compressed_int4_zeros": lambda: compressed(
        "pack-quantized", 4, strategy="group", group_size=32, symmetric=False
    ),
    "compressed_int4_channel_zeros": lambda: compressed("pack-quantized", 4, symmetric=False),
    "compressed_int8_packed": lambda: compressed("pack-quantized"),
    "compressed_int8": lambda: compressed("int-quantized"),
    "compressed_int8_zeros": lambda: compressed("naive-quantized", symmetric=False),
    "compressed_fp8_tensor": lambda: compressed("float-quantized", kind="float", strategy="tensor"),
    "compressed_fp8_channel": lambda: compressed("float-quantized", kind="float", dtype="bfloat16"),
    "compressed_fp8_block": lambda: compressed(
        "float-quantized", kind="float", strategy="block", block_structure=[32, 96]
    ),
    "compressed_mxfp4": lambda: compressed_fp4("mxfp4-pack-quantized", "MXFP4"),
    "compressed_nvfp4": lambda: compressed_fp4("nvfp4-pack-quantized", "NVFP4"),
    "fp8_block": lambda: fp8((24, 64)),
    "fp8_block_bf16": lambda: fp8((16, 32), "bfloat16"),
    "fp8_block_e8m0": lambda: fp8((16, 32), "float8_e8m0fnu"),
    "fp8_tensor": lambda: fp8(None),
    "mxfp4": mxfp4,
    "nf4": lambda: nf4(False),
    "nf4_double": lambda: nf4(True),
    "bnb_int8": int8,
}


def make(name: str) -> int:
    """Write the folder of a case, replacing an old one. Returns its size in bytes."""
    torch.manual_seed(0)
    config, tensors, values = CASES[name]()
    folder = DATA / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    named = {f"{MODULE}.{part}": x.detach().contiguous() for part, x in tensors.items()}
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    values = values.detach().float().contiguous().numpy()
    np.savez_compressed(folder / "values.npz", values=values)
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the references of quantised formats.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    names = parser.parse_args().cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; the cases are {', '.join(CASES)}")
    for name in names:
        print(f"{name:32} {make(name) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
