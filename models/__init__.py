"""Model architectures: one file each, named after its model_type, imported on demand."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from infer.models.blocks.decoder import Decoder
    from infer.models.loading.checkpoint import Checkpoint
    from infer.models.loading.config import RawConfig
    from infer.models.loading.weights import WeightSpec


class Architecture(NamedTuple):
    """A class, in the module that the model_type names, and published models that it runs."""

    cls: str
    published: str


ARCHITECTURES = {  # by model_type
    "afmoe": Architecture("Afmoe", "Trinity Nano, Mini and Large"),
    "apertus": Architecture("Apertus", "Apertus 8B and 70B"),
    "arcee": Architecture("Arcee", "AFM-4.5B"),
    "bamba": Architecture("Bamba", "Bamba 9B"),
    "codegen": Architecture("CodeGen", "CodeGen (350M to 16B)"),
    "cohere": Architecture("Cohere", "Command R"),
    "cohere2": Architecture("Cohere2", "Command R7B, Command A"),
    "cwm": Architecture("Cwm", "Code World Model"),
    "deepseek_v2": Architecture("DeepseekV2", "DeepSeek-V2, V2-Lite, Coder-V2-Lite"),
    "deepseek_v3": Architecture("DeepseekV3", "DeepSeek-V3, DeepSeek-R1, Moonlight-16B-A3B"),
    "dots1": Architecture("Dots1", "dots.llm1"),
    "ernie4_5": Architecture("Ernie45", "ERNIE 4.5 (dense)"),
    "ernie4_5_moe": Architecture("Ernie45Moe", "ERNIE 4.5 (21B-A3B, 300B-A47B)"),
    "exaone4": Architecture("Exaone4", "EXAONE 4.0"),
    "exaone_moe": Architecture("ExaoneMoe", "K-EXAONE-236B-A23B"),
    "falcon": Architecture("Falcon", "Falcon 7B, 40B and 11B"),
    "falcon_h1": Architecture("FalconH1", "Falcon-H1 (0.5B to 34B)"),
    "flex_olmo": Architecture("FlexOlmo", "FlexOlmo-7x7B"),
    "gemma": Architecture("Gemma", "Gemma"),
    "gemma2": Architecture("Gemma2", "Gemma 2"),
    "gemma3_text": Architecture("Gemma3Text", "Gemma 3 (1B and 270M)"),
    "gemma4_text": Architecture("Gemma4Text", "Gemma 4, the text model"),
    "gemma4_unified_text": Architecture("Gemma4UnifiedText", "Gemma 4 (12B), the text model"),
    "glm": Architecture("Glm", "GLM-4"),
    "glm4": Architecture("Glm4", "GLM-4-0414"),
    "glm4_moe": Architecture("Glm4Moe", "GLM-4.5, GLM-4.5-Air, GLM-4.6"),
    "glm4_moe_lite": Architecture("Glm4MoeLite", "GLM-4.7-Flash"),
    "gpt2": Architecture("GPT2", "GPT-2, DistilGPT2"),
    "gpt_bigcode": Architecture("GPTBigCode", "StarCoder, StarCoderBase, SantaCoder"),
    "gpt_neo": Architecture("GPTNeo", "GPT-Neo (125M to 2.7B), TinyStories"),
    "gpt_neox": Architecture("GPTNeoX", "GPT-NeoX, Pythia"),
    "gpt_oss": Architecture("GptOss", "gpt-oss-20b, gpt-oss-120b"),
    "gptj": Architecture("GPTJ", "GPT-J 6B"),
    "granite": Architecture("Granite", "Granite 3"),
    "granite_swa": Architecture("GraniteSwa", "Granite Swash 2B"),
    "granitemoe": Architecture("GraniteMoe", "Granite 3 (1B-A400M, 3B-A800M)"),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybrid", "Granite 4.0 (micro, tiny, small, 1B, 350M; also H)"
    ),
    "granitemoeshared": Architecture("GraniteMoeShared", "Granite 3 with shared experts"),
    "helium": Architecture("Helium", "Helium"),
    "hunyuan_v1_dense": Architecture("HunyuanDense", "Hunyuan 0.5B to 7B (dense)"),
    "hunyuan_v1_moe": Architecture("HunyuanMoe", "Hunyuan-A13B"),
    "hy_v3": Architecture("HyV3", "Hy3"),
    "hyperclovax": Architecture("HyperClovaX", "HyperCLOVA X SEED Think 14B"),
    "internlm3": Architecture("InternLM3", "InternLM3"),
    "iquestcoder": Architecture("IQuestCoder", "IQuest-Coder-V1"),
    "jais2": Architecture("Jais2", "Jais 2"),
    "lfm2": Architecture("Lfm2", "LFM2 (350M to 2.6B)"),
    "lfm2_moe": Architecture("Lfm2Moe", "LFM2-8B-A1B"),
    "llama": Architecture("Llama", "Llama 2, Llama 3, 3.1 and 3.2 (text), SmolLM2, TinyLlama, Yi"),
    "mellum": Architecture("Mellum", "Mellum 2"),
    "mimo": Architecture("MiMo", "MiMo-7B (Base, SFT, RL)"),
    "minicpm3": Architecture("MiniCPM3", "MiniCPM3-4B"),
    "minimax_m2": Architecture("MiniMaxM2", "MiniMax-M2, M2.1, M2.5"),
    "ministral": Architecture("Ministral", "Ministral"),
    "ministral3": Architecture("Ministral3", "Ministral 3"),
    "mistral": Architecture("Mistral", "Mistral 7B, with and without its sliding window"),
    "mistral4": Architecture("Mistral4", "Mistral Small 4"),
    "mixtral": Architecture("Mixtral", "Mixtral 8x7B, 8x22B"),
    "nanochat": Architecture("NanoChat", "nanochat"),
    "nemotron": Architecture("Nemotron", "Nemotron-Mini, Minitron (4B and 8B)"),
    "nemotron_h": Architecture("NemotronH", "Nemotron Nano 9B and 12B v2, Nemotron 3 Nano 30B-A3B"),
    "olmo": Architecture("Olmo", "OLMo 1B and 7B"),
    "olmo2": Architecture("Olmo2", "OLMo 2"),
    "olmo3": Architecture("Olmo3", "OLMo 3"),
    "olmoe": Architecture("Olmoe", "OLMoE-1B-7B"),
    "opt": Architecture("OPT", "OPT (125M, 1.3B to 66B)"),
    "persimmon": Architecture("Persimmon", "Persimmon 8B"),
    "phi": Architecture("Phi", "Phi-1, Phi-1.5, Phi-2"),
    "phi3": Architecture("Phi3", "Phi-3, Phi-3.5 and Phi-4 (text)"),
    "qwen2": Architecture("Qwen2", "Qwen2, Qwen2.5"),
    "qwen2_moe": Architecture("Qwen2Moe", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
    "qwen3": Architecture("Qwen3", "Qwen3 (dense)"),
    "qwen3_5_moe_text": Architecture("Qwen35MoeText", "Qwen3.5-35B-A3B, the text model"),
    "qwen3_5_text": Architecture("Qwen35Text", "Qwen3.5 (dense), the text model"),
    "qwen3_moe": Architecture("Qwen3Moe", "Qwen3-30B-A3B, Qwen3-235B-A22B"),
    "qwen3_next": Architecture("Qwen3Next", "Qwen3-Next-80B-A3B"),
    "qwen3_vl_moe_text": Architecture(
        "Qwen3VLMoeText", "Qwen3-VL-30B-A3B, 235B-A22B, the text model"
    ),
    "seed_oss": Architecture("SeedOss", "Seed-OSS"),
    "smollm3": Architecture("SmolLM3", "SmolLM3"),
    "solar_open": Architecture("SolarOpen", "Solar-Open-100B"),
    "stablelm": Architecture("StableLm", "StableLM 2 (1.6B and 12B), StableLM 3B"),
    "starcoder2": Architecture("Starcoder2", "StarCoder2"),
    "vaultgemma": Architecture("VaultGemma", "VaultGemma 1B"),
    "youtu": Architecture("Youtu", "Youtu-LLM-2B"),
}

# Models that also see, and of which the text model is run.
MULTIMODAL = {
    "gemma3": "Gemma 3 (4B to 27B)",
    "gemma4": "Gemma 4 (E2B, E4B, 26B-A4B, 31B)",
    "gemma4_unified": "Gemma 4 (12B)",
    "idefics3": "Idefics3, SmolVLM",
    "internvl": "InternVL3 (in transformers' form)",
    "lfm2_vl": "LFM2-VL",
    "llava": "LLaVA 1.5",
    "llava_next": "LLaVA 1.6",
    "llava_onevision": "LLaVA-OneVision",
    "mistral3": "Mistral Small 3.1, 3.2 and 4, Ministral 3",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_vl": "Qwen2-VL",
    "qwen3_5": "Qwen3.5 (dense)",
    "qwen3_5_moe": "Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B",
    "qwen3_vl": "Qwen3-VL (dense)",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B, 235B-A22B",
    "smolvlm": "SmolVLM2",
}


def open_model(path: Path, *, predicts: bool = False) -> tuple[Decoder, Checkpoint]:
    """The model in a folder or a GGUF file, and its checkpoint, of which the headers are read.
    predicts: the weights of its `predictor` too, if the checkpoint has it. Raises ModelError for
    what is missing, damaged or not implemented."""
    from infer.kernels.errors import UnsupportedError
    from infer.models.blocks.mtp import find_predictor
    from infer.models.blocks.multimodal import text_model
    from infer.models.loading.checkpoint import Checkpoint
    from infer.models.loading.config import RawConfig
    from infer.models.loading.formats import find_format, find_packed
    from infer.models.loading.formats.gguf import Gguf
    from infer.models.loading.formats.gguf_config import gguf_checkpoint, gguf_config
    from infer.models.loading.formats.mlx import unstacked, untransposed
    from infer.models.loading.head import settle_head, with_head

    if path.is_file():
        gguf = Gguf.open(path)
        raw = gguf_config(gguf)
        checkpoint = gguf_checkpoint(gguf, raw)
    else:
        raw = RawConfig.open(path)
        raw, checkpoint = with_head(raw, unstacked(untransposed(Checkpoint.open(path))))
        if raw.get("model_type", "", str) in MULTIMODAL:
            raw, checkpoint = text_model(raw, checkpoint)
    found = find_format(raw, path)
    model, checkpoint = settle_head(build_model(raw), checkpoint)
    if model.folded_by_mlx and checkpoint.whole_norms:
        raise UnsupportedError(
            f"{path} is as MLX converts {model.config.model_type}, with factors of config.json in "
            "its weights, which is not implemented. Take the model in Hugging Face form."
        )
    specs: Iterable[WeightSpec] = model.weights()
    if predicts and (layer := find_predictor(model, checkpoint.tensors)) is not None:
        specs = chain(specs, layer.weights())
    return model, find_packed(checkpoint, found, specs)


def build_model(raw: RawConfig) -> Decoder:
    """The model that a config.json describes. Raises UnsupportedError for one that is not here."""
    from infer.kernels.errors import UnsupportedError
    from infer.models.blocks.multimodal import text_config
    from infer.models.loading.config import nearest, shown

    if raw.get("model_type", "", str) in MULTIMODAL:
        raw = text_config(raw)
    model_type = raw.get("model_type", "", str)
    if not model_type:
        raise UnsupportedError(
            f"{raw.place} has no model_type, which names the architecture. Get the file that was "
            "published with the model."
        )
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        known = [*ARCHITECTURES, *MULTIMODAL]
        raise UnsupportedError(
            f"{raw.place}: the architecture {shown(model_type)} is not implemented."
            f"{nearest(model_type, known)} docs/models.md lists all {len(known)} that are."
        )
    cls = getattr(import_module(f"infer.models.{model_type}"), architecture.cls)
    model: Decoder = cls(cls.read_config(raw))
    return model
