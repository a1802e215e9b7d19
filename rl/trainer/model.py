"""A Megatron model of the architecture that a Hugging Face config describes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl.trainer import platform
from rl.trainer.config import TrainerConfig

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from rl.trainer.dense_layer import DenseLayer, group_layers
from rl.trainer.families.base import UnsupportedModelError
from rl.trainer.families.registry import family_of
from rl.trainer.layers import PackedRotaryEmbedding
from rl.trainer.specs import block_spec
from rl.trainer.unstored import UnstoredTensors, place

INDEXER = ".indexer."
"""In the names of the parameters of sparse attention's indexers."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_hf_config(directory: Path) -> PretrainedConfig:
    """Read ``config.json`` of a local directory and check that the model is one we can train.

    Raises:
        UnsupportedModelError: names the setting and its value.
        FileNotFoundError: the directory has no ``config.json``.
    """
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} has no config.json")
    hf = AutoConfig.from_pretrained(directory, local_files_only=True)
    family = family_of(hf)
    rope_type = hf.rope_parameters["rope_type"]
    if rope_type not in family.rope_types:
        raise UnsupportedModelError(f"rope_type {rope_type!r} is not supported; supported: {family.rope_types}")
    for name, value in family.refused(hf).items():
        if value:
            raise UnsupportedModelError(f"{family.architecture} with {name} set is not supported")
    if hf.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act {hf.hidden_act!r} is not supported; supported: 'silu'")
    return hf


def inverse_frequencies(hf: PretrainedConfig) -> Float32[Tensor, " half_dim"]:
    """Rotary frequencies, from the same functions that the Hugging Face model uses."""
    rope = hf.rope_parameters
    if rope["rope_type"] == "default":
        rotated = family_of(hf).rotary_dim(hf)
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        return 1.0 / (rope["rope_theta"] ** exponents)
    frequencies, attention_scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"))
    if attention_scaling != 1.0:
        raise UnsupportedModelError(f"rope_type {rope['rope_type']!r} scales attention by {attention_scaling}")
    return frequencies


def _leave_uninitialised(weight: Tensor) -> Tensor:
    return weight


def transformer_config(hf: PretrainedConfig, config: TrainerConfig) -> TransformerConfig:
    """Megatron's options for this model and layout.

    Raises:
        UnsupportedModelError: the layout does not divide the model; names the numbers.
    """
    parallel, family = config.parallel, family_of(hf)
    family.check_layout(hf, parallel)
    moe_layers = family.moe_layers(hf)
    dtype = DTYPES[config.dtype]
    # With only indexers trained, no layer keeps activations for a backward pass.
    recompute = config.recompute and config.trained == "model"
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.dtype == "bfloat16",
        # Every weight is loaded before it is used, so that drawing random ones would only cost time. (Not
        # perform_initialization=False: Megatron would leave out the marks that tell split weights from copies, and
        # count the gradients of one rank alone in the norm.)
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        use_cpu_initialization=not torch.cuda.is_available(),
        # The sums over tokens carry their global denominators already, so that gradients are summed over the
        # data-parallel ranks; without this Megatron divides them by the number of ranks.
        calculate_per_token_loss=True,
        # An interleaved pipeline pads its micro-batches to one length (see ``run_schedule``).
        variable_seq_lengths=parallel.virtual_pipeline == 1,
        # In one batch the transfers of two ranks that are each other's neighbours on both sides get mixed up.
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it with variable lengths, also of dense models
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        # A list, also where all entries are equal, makes checkpoints name each layer by its number; with a pattern
        # Megatron can't stack them into one tensor.
        moe_layer_freq=[int(moe) for moe in moe_layers] if any(moe_layers) else 1,
        moe_router_load_balancing_type="none",
        **family.options(hf),
    )


class Trunk(GPTModel):
    """GPTModel that ends at the last hidden state; what comes after it is not Megatron's."""

    def __init__(self, hf: PretrainedConfig, config: TrainerConfig, tied: bool, chunk: int = 0) -> None:
        """``chunk`` counts this rank's stages."""
        options = transformer_config(hf, config)
        self.parallel = config.parallel
        self.attends_in_rows = family_of(hf).attends_in_rows
        tensor = config.parallel.tensor
        self.rows_per_rank = -(-hf.vocab_size // tensor)
        if hf.vocab_size <= (tensor - 1) * self.rows_per_rank:
            raise UnsupportedModelError(f"vocab_size {hf.vocab_size} is too small for tensor parallel size {tensor}")
        super().__init__(
            config=options,
            transformer_layer_spec=block_spec(family_of(hf), hf, options, chunk),
            vocab_size=self.rows_per_rank * tensor,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            parallel_output=True,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            vp_stage=chunk if config.parallel.virtual_pipeline > 1 else None,
        )
        self.stage = parallel_state.get_pipeline_model_parallel_rank() + chunk * config.parallel.pipeline
        """Of ``ParallelConfig.stages``."""
        self.rotary_pos_emb = PackedRotaryEmbedding(inverse_frequencies(hf))
        layers = self.decoder.layers
        if self.post_process and len(layers) and isinstance(layers[-1], DenseLayer):
            layers[-1].ends_model = True
        group_layers(layers, config.layers_per_graph, config.cuda_graphs, config.layer_kernels == "triton")

    def release_graphs(self) -> None:
        """Forget CUDA graphs, before the weights or their gradients move to other addresses."""
        for layer in self.decoder.layers:
            if isinstance(layer, DenseLayer):
                layer.release_graphs()

    def _postprocess(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        return hidden_states


class PolicyModel(Trunk):
    """A language model: ``rl.trainer.head`` goes on from the last hidden state without full logits."""

    def __init__(self, hf: PretrainedConfig, config: TrainerConfig, chunk: int = 0) -> None:
        super().__init__(hf, config, tied=hf.tie_word_embeddings, chunk=chunk)
        rank = parallel_state.get_tensor_model_parallel_rank()
        self.tokens = hf.vocab_size
        self.vocab_rows = min(self.rows_per_rank, hf.vocab_size - rank * self.rows_per_rank)
        """Rows of this rank's embedding that are tokens; the rest pads the vocabulary to a multiple of the ranks."""

    def output_weight(self) -> Float[Tensor, "vocab_part hidden"]:
        """This rank's rows of the output projection, without those that pad the vocabulary."""
        return self._output_parameter()[: self.vocab_rows]

    def output_gradient(self) -> Float32[Tensor, "vocab_part hidden"] | None:
        """The same rows of the gradient buffer; None where there is none. What adds to it itself saves a tensor as
        large, which for many vocabularies is the largest of a step."""
        parameter = self._output_parameter()
        return parameter.main_grad[: self.vocab_rows] if hasattr(parameter, "main_grad") else None

    def _output_parameter(self) -> Tensor:
        shared = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if shared else self.output_layer.weight


def build_chunks(hf: PretrainedConfig, config: TrainerConfig, stored: bool = True) -> list[PolicyModel]:
    """This rank's stages of the model, with uninitialised weights, on this process's device.

    Args:
        stored: false for parameters without memory of their own, of NaN (``rl.trainer.unstored``).
    """
    return [_build_chunk(hf, config, chunk, stored) for chunk in range(config.parallel.virtual_pipeline)]


def _build_chunk(hf: PretrainedConfig, config: TrainerConfig, chunk: int, stored: bool) -> PolicyModel:
    with nullcontext() if stored else UnstoredTensors():
        model = PolicyModel(hf, config, chunk)
    if not stored:
        place(model, platform.device())
    model = model.to(platform.device())
    train_only(model, lambda name: (INDEXER in name) == (config.trained != "model"))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModelError(f"trained={config.trained}: the model has no indexer")
    model.train()
    return model


def train_only(model: Trunk, trained: Callable[[str], bool]) -> None:
    """Freeze the parameters whose names are not ``trained``. Before the model gets its gradient buffers."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
