"""StarCoder (Li et al. 2023), SantaCoder (Ben Allal et al. 2023): GPT-2 with one head of keys."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.gpt2 import GPT2, read_gpt2
from infer.models.loading.config import RawConfig


class GPTBigCode(GPT2):
    """GPT-2, but with matrices that are not transposed in the files."""

    transposed = False

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw.expect("multi_query", True)
        return read_gpt2(raw, kv_heads=1)
