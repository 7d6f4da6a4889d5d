"""The operations that a forward pass is written in, as functions of Values.

Activations are Values [rows of the step, width] in f32; `+` and `*` are operations too.
"""

from infer.kernels.lowering.graph import Input, operation, split
from infer.kernels.ops.attention import Attention
from infer.kernels.ops.elementwise import (
    XIELU,
    Activation,
    Clip,
    PositionScale,
    Scale,
    SigmoidGate,
    Softcap,
)
from infer.kernels.ops.embedding import Embedding, LogitsRows, PositionEmbedding
from infer.kernels.ops.experts import ExpertDown, ExpertGateUp, Route
from infer.kernels.ops.head_linear import HeadLinear
from infer.kernels.ops.hidden import HiddenBefore
from infer.kernels.ops.linear import Linear
from infer.kernels.ops.norm import LayerNorm, RMSNorm
from infer.kernels.ops.recurrent import DeltaRule, ShortConv, SSMScan
from infer.kernels.ops.rope import Rotate

activation = operation(Activation)
attention = operation(Attention)
clip = operation(Clip)
delta_rule = operation(DeltaRule)
embedding = operation(Embedding)
expert_down = operation(ExpertDown)
expert_gate_up = operation(ExpertGateUp)
head_linear = operation(HeadLinear)
hidden_before = operation(HiddenBefore)
input = operation(Input)
layernorm = operation(LayerNorm)
linear = operation(Linear)
logits_rows = operation(LogitsRows)
position_embedding = operation(PositionEmbedding)
position_scale = operation(PositionScale)
rmsnorm = operation(RMSNorm)
rope = operation(Rotate)
route = Route  # which the experts' operations ask for
scale = operation(Scale)
short_conv = operation(ShortConv)
sigmoid_gate = operation(SigmoidGate)
softcap = operation(Softcap)
ssm_scan = operation(SSMScan)
xielu = operation(XIELU)

__all__ = ["split"]
