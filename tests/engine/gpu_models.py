"""What the GPU tests of engines share: random Llamas whose weights tell them apart, and how far bfloat16 may be off."""

import functools
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

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
