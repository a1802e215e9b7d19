"""Asks the installed SGLang how many tokens fit into a budget, in a process of its own: JSON cases in, tokens out.

The classes that size the pools are SGLang's; what they ask of a running server is answered from the case.
"""

import json
import sys
from types import SimpleNamespace

import torch

from rollout.engine import cpu_stand_ins

DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "float32": torch.float32}


def tokens(case, pools, configurator) -> int:
    """Of SGLang's DefaultPoolConfigurator."""
    hf = SimpleNamespace(**case["hf_config"])
    sparse = case["hisparse"] is not None
    memory = SimpleNamespace(
        enable_hisparse=sparse,
        hisparse_config=json.dumps(case["hisparse"]) if sparse else None,
        enable_hierarchical_cache=False,
        enable_unified_cache_external_linker=False,
    )
    kernel = SimpleNamespace(dsa_prefill_backend="flashmla_kv", dsa_decode_backend="flashmla_kv")
    parallel = SimpleNamespace(attn_tp_size=case["attention_gpus"], attn_dcp_size=1, enable_dsa_cache_layer_split=False)
    answers = {
        "get_memory": memory,
        "get_parallel": parallel,
        "get_disagg": SimpleNamespace(disaggregation_mode="null"),
        "get_exec": SimpleNamespace(kernel=kernel),
        "get_schedule": SimpleNamespace(max_total_tokens=None),
    }
    from sglang.srt.layers.cp import utils
    from sglang.srt.mem_cache.sparsity import factory

    for module in (pools, configurator, factory, utils):
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, lambda answer=answer: answer)
    pools.mambaish_config = lambda config: None
    pools.compute_page_shard_scratch_bytes = lambda kvc, include_mtp: 0
    head = getattr(hf, "head_dim", None)
    model = SimpleNamespace(
        hf_config=hf,
        kv_lora_rank=getattr(hf, "kv_lora_rank", None),
        qk_rope_head_dim=getattr(hf, "qk_rope_head_dim", None),
        head_dim=head,
        v_head_dim=head,
        context_len=hf.max_position_embeddings,
        get_num_kv_heads=lambda tp, dcp: max(1, hf.num_key_value_heads // tp),
    )
    layers = hf.num_hidden_layers
    kvc = SimpleNamespace(
        kv_cache_dtype_str=case["kv_dtype"],
        kv_cache_dtype=DTYPES[case["kv_dtype"]],
        layer_info=SimpleNamespace(num_effective_layers=layers, start_layer=0, end_layer=layers),
        model_config=model,
        use_mla_backend=model.kv_lora_rank is not None,
        is_draft_worker=False,
        spec_algorithm=SimpleNamespace(
            is_eagle=lambda: False, is_standalone=lambda: False, is_dflash_family=lambda: False
        ),
        server_args=SimpleNamespace(enable_hisparse=sparse, enable_dsa_cache_layer_split=False),
        mambaish_config=None,
        pp_size=1,
    )
    return pools.DefaultPoolConfigurator(kvc).calculate_pool_sizes(case["budget"], case["page"]).max_total_num_tokens


def main() -> None:
    cpu_stand_ins.install()
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor import pool_configurator

    cases = json.load(sys.stdin)
    print(json.dumps([tokens(case, pool_configurator, kv_cache_configurator) for case in cases]))


if __name__ == "__main__":
    main()
