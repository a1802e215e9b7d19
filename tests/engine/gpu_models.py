"""What the GPU tests of engines share: random models whose weights tell them apart, and how far bfloat16 may be off."""

import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig

from benchmarks.logprob_gap.models import make_config
from benchmarks.publish.models import SIZES, random_weights, write

SIZE = SIZES["135m"]
CONTEXT = 2048
NOISE = 0.5
"""Above the largest |Δ log-prob| of 63 tokens of one model on two kernels in bfloat16 (0.27 was seen; on average 0.09);
other weights differ by more than 1, and what is exact is compared by checksums."""
START_S = 280.0
"""The first start compiles kernels."""
EOS = 1
SETTINGS = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-prefill-cuda-graph": True,
    "cuda-graph-max-bs-decode": 16,
}
"""SGLang's arguments."""
SPARSE_VOCABULARY = 4096
SPARSE_SPREAD = 0.02
"""Of random weights. In a copy with 16 heads and 16 experts (fp32 on a CPU, prompts of 2,560 tokens) another prompt
moves the log-probs of the likeliest tokens by 1.8 on average, one page of another by 0.08, each token's neighbour in
its place by 0.06, and bfloat16 by 0.02 (at 0.03 by 2.7, 0.17, 0.13 and 0.08)."""
SPARSE_SETTINGS = {name: value for name, value in SETTINGS.items() if name != "attention-backend"} | {
    "dsa-prefill-backend": "flashmla_sparse",  # FlashAttention-3 need not be there
    "dsa-decode-backend": "flashmla_sparse",
    "cuda-graph-max-bs-decode": 8,
}


class Model:
    """Its weights on the device, and its directory."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.weights = random_weights(SIZE, seed, "cuda", torch.bfloat16)
        for name, tensor in self.weights.items():
            if "norm" not in name:
                tensor.mul_(3)  # so that two models disagree clearly
        self.weights["model.embed_tokens.weight"][EOS] = 0  # its logit is 0 among large ones: no reply ends by itself
        self.directory = write(directory, SIZE, self.weights, CONTEXT)

    @functools.cached_property
    def hf(self) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(self.directory, dtype=torch.bfloat16).cuda().eval()

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """HF's of each token given those before it, from the second on."""
        with torch.no_grad():
            scores = self.hf(torch.tensor([ids], device="cuda")).logits[0, :-1].float().log_softmax(-1).cpu()
        return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def sparse_config() -> PretrainedConfig:
    """GLM-5's attention and routing in four layers (DeepSeek Sparse Attention, top k 2,048)."""
    config = make_config("dsa", True, SPARSE_SPREAD)
    config.vocab_size = SPARSE_VOCABULARY
    return config


def write_sparse(config: PretrainedConfig, directory: Path, seed: int, device: str = "cuda") -> None:
    """Random weights. Experts are scaled down: which of them a token takes is a matter of rounding, and should not be
    most of what two servers differ by."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        experts = [
            tensor for name, tensor in model.named_parameters() if ".mlp.experts." in name and "down_proj" in name
        ]
        assert experts, "no parameter is named as an expert's"
        for tensor in experts:
            tensor.mul_(0.2)
    model.save_pretrained(directory)
