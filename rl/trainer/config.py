"""Options of the trainer. Light: the driver imports it without Megatron."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ParallelConfig(BaseModel):
    """How the model is spread over the ranks. Data parallelism is what is left of the world size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(1, ge=1, le=64)
    pipeline: int = Field(1, ge=1, le=128)
    virtual_pipeline: int = Field(1, ge=1, le=128)
    """Stages that each pipeline rank has, interleaved with the other ranks' (rank 0 has stages 0, P, 2P, ...): shorter
    bubbles for more communication. The number of micro-batches becomes a multiple of ``pipeline``."""
    context: int = Field(1, ge=1, le=64)
    expert: int = Field(1, ge=1, le=1024)
    expert_tensor: int = Field(1, ge=1, le=64)
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel blocks along the sequence."""

    @model_validator(mode="after")
    def _needed_sizes(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs tensor > 1")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError("virtual_pipeline needs pipeline > 1")
        return self

    @property
    def stages(self) -> int:
        """Of the model, in the order of the forward pass; stage ``s`` is on pipeline rank ``s % pipeline``."""
        return self.pipeline * self.virtual_pipeline

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.tensor * self.pipeline * self.context


class OptimizerConfig(BaseModel):
    """Adam with decoupled weight decay; the rate warms up linearly, then decays to ``min_lr_ratio · lr``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(1e-6, gt=0, le=1)
    warmup_steps: int = Field(0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Over the steps after the warm-up, up to the total that the run sets; the last step still has a rate above 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=1)
    clip_grad: float = Field(1.0, ge=0)
    """Largest L2 norm of the whole gradient; 0 turns clipping off."""

    @model_validator(mode="after")
    def _betas_below_one(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), they are {self.betas}")
        return self


class TrainerConfig(BaseModel):
    """One trainer: its ranks, layout, optimizer and memory bounds. The defaults train a tiny model on a laptop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parallel: ParallelConfig = ParallelConfig.model_validate({})
    optimizer: OptimizerConfig = OptimizerConfig.model_validate({})
    world_size: int = Field(1, ge=1, le=65536)
    cpus_per_rank: float = Field(1.0, gt=0)
    gpus_per_rank: float = Field(0.0, ge=0, le=1)
    """0 trains on the CPU."""
    threads_per_rank: int = Field(1, ge=1, le=1024)
    """PyTorch's intra-operation threads."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; under bfloat16 the optimizer keeps fp32 main weights, and gradients are fp32."""
    trained: Literal["model", "indexer_dense", "indexer_sparse"] = "model"
    """``model``: everything but the indexers of sparse attention. ``indexer_...``: the indexers alone, which learn to
    predict the attention over all positions (dense: attention is dense meanwhile) or over those that they select."""
    recompute: bool = False
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    max_tokens_per_micro_batch: int = Field(16_384, ge=1)
    """Per data-parallel rank; a longer sample gets a micro-batch of its own."""
    logits_chunk_tokens: int = Field(2048, ge=1)
    """Tokens whose fp32 logits exist at the same time in the output head."""
    layers_per_graph: int = Field(1, ge=1)
    """Consecutive dense layers that are compiled as one graph on CUDA. More make a small model faster (its layers take
    less time than starting them), and its first update slower."""
    cuda_graphs: bool = False
    """Replay the dense layers, forward and backward, as CUDA graphs, one for each of a few sizes of micro-batch, where
    they run as whole layers (bfloat16 on CUDA). Each size takes a second or two when it first comes."""
    layer_kernels: Literal["triton", "compiled"] = "triton"
    """Of the layers in CUDA graphs: written out with kernels in Triton, which start in seconds, or fused by a compiler,
    which takes a minute for a large model. Layers outside of graphs are compiled."""
    optimizer_kernel: Literal["triton", "torch"] = "triton"
    """Adam's on CUDA: ours, which writes the model's weights in the same pass, or PyTorch's."""
    seed: int = Field(0, ge=0, lt=2**31)
    digest_gradients: bool = False
    """Log a hash of each update's gradient, to compare runs bit by bit; it reads every gradient once."""
    timeout_s: float = Field(600.0, gt=0)
    """Of every collective operation: a rank that waits longer for another one fails."""
    start_timeout_s: float = Field(180.0, gt=0)
    """For the ranks to be placed, to start and to join their process group."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Of one operation (an update, a checkpoint) on all ranks."""

    @model_validator(mode="after")
    def _ranks_divide(self) -> Self:
        if self.world_size % self.parallel.model_ranks:
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of tensor · pipeline · context = "
                f"{self.parallel.model_ranks}"
            )
        expert_ranks = self.parallel.expert * self.parallel.expert_tensor * self.parallel.pipeline
        if self.world_size % expert_ranks:
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of expert · expert_tensor · pipeline = {expert_ranks}"
            )
        return self

    @model_validator(mode="after")
    def _graphs_hold_one_pass(self) -> Self:
        parallel = self.parallel
        if self.cuda_graphs and (self.recompute or max(parallel.tensor, parallel.pipeline, parallel.context) > 1):
            raise ValueError("cuda_graphs needs recompute = false and tensor = pipeline = context = 1")
        return self

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.parallel.model_ranks
