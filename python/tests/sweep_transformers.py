"""Every causal language model of transformers, small and with random weights, on Foveal against eager attention; by hand, for it takes minutes.

    python python/tests/sweep_transformers.py [MODEL TYPE…]

Prints a line for each: same, how large the difference is, or why it was not run. Ends with 1 when a model that called Foveal, or that took its
masks, differs."""

import os
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

import test_transformers as tests  # noqa: E402
from foveal.integrations import transformers as on_foveal  # noqa: E402

# What makes a configuration of most models small; members that one does not have do no harm.
SMALL = dict(
    tests.TEXT, head_dim=16, sliding_window=5, n_embd=64, n_layer=2, n_head=4, n_positions=128, d_model=64, ffn_dim=96, num_experts=4,
    num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16, n_group=1, topk_group=1, n_inner=96, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96,
    encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=96, word_embed_proj_dim=64, is_decoder=True, num_layers=2, num_heads=4,
)
# Models of latent attention have as many key heads as query heads, and head_dim is of the rotated part.
LATENT = dict(SMALL, num_key_value_heads=4, head_dim=8)


def difference(kind, members):
    """The largest difference of logits and how often Foveal was called."""
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **members)
        parameters = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if parameters > 50_000_000:
        raise RuntimeError(f"{parameters:,} parameters, since SMALL does not know its members")
    calls = [0]
    inner = on_foveal.attend

    def counted(*args, **kwargs):
        calls[0] += 1
        return inner(*args, **kwargs)

    on_foveal.attend = counted
    try:
        eager, ours = tests.make("AutoModelForCausalLM", kind, members, "cpu")
        ids, mask = tests.padded("left", "cpu")
        with torch.no_grad():
            logits = [model(input_ids=ids, attention_mask=mask).logits.float() for model in (eager, ours)]
        return (logits[0] - logits[1])[mask.bool()].abs().max().item(), calls[0]
    finally:
        on_foveal.attend = inner


def main():
    failed = same = never = 0
    for kind in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            try:
                error, calls = difference(kind, SMALL)
            except RuntimeError:
                error, calls = difference(kind, LATENT)
        except Exception as why:  # Whatever a configuration of our making does to a model.
            print(f"{kind:28} not run: {type(why).__name__}: {str(why).splitlines()[0][:100] if str(why) else ''}", flush=True)
            continue
        if error > 1e-4:
            failed += 1
            print(f"{kind:28} DIFFERS by {error:.2g}, {calls} calls", flush=True)
        elif calls == 0:
            never += 1
            print(f"{kind:28} never called", flush=True)
        else:
            same += 1
            print(f"{kind:28} same, {error:.1g}, {calls} calls", flush=True)
    print(f"{same} same, {failed} differ, {never} never called")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
