"""Tensors of the MLPs and of the routed experts, which the families call by the same names."""

from __future__ import annotations

from transformers import PretrainedConfig

from rl.trainer.weight_forms import Weight, copied, gate_up, row


def dense_weights(hf: PretrainedConfig) -> list[Weight]:
    return _gated("mlp.", "mlp.", hf.intermediate_size, hf.hidden_size)


def moe_weights(hf: PretrainedConfig, experts: int, bias: bool, shared: int) -> list[Weight]:
    """Router, routed experts and shared expert of one layer.

    Args:
        experts: routed experts.
        bias: whether the choice of experts (not their weights) has a bias for each of them.
        shared: experts that every token goes through, as one of so many times the size.
    """
    hidden, intermediate = hf.hidden_size, hf.moe_intermediate_size
    weights = [copied("mlp.router.weight", "mlp.gate.weight", experts, hidden)]
    if bias:
        # In fp32 whatever the model's type: it decides between experts whose scores are close.
        name = "mlp.gate.e_score_correction_bias"
        weights.append(copied("mlp.router.expert_bias", name, experts, float32=True))
    for expert in range(experts):
        target, source = f"mlp.experts.local_experts.{expert}.", f"mlp.experts.{expert}."
        weights += _gated(target, source, intermediate, hidden, expert)
    if shared:
        weights += _gated("mlp.shared_experts.", "mlp.shared_experts.", intermediate * shared, hidden)
    return weights


def _gated(target: str, source: str, intermediate: int, hidden: int, expert: int | None = None) -> list[Weight]:
    gate, up = f"{source}gate_proj.weight", f"{source}up_proj.weight"
    return [
        gate_up(f"{target}linear_fc1.weight", gate, up, intermediate, hidden, expert),
        row(f"{target}linear_fc2.weight", f"{source}down_proj.weight", hidden, intermediate, expert),
    ]
