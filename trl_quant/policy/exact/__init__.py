"""
Exact rollouts: the policy computes the operators between its linear layers with its engine's kernels, so that trainer
and sampler get the same bits. The engine's kernels have no gradients; this room adds them:

| operator | forward | backward |
|---|---|---|
| RMSNorm | [`~layers.norm.rms_norm`], which the engine then uses too | a kernel in the same file |
| rotary embedding, attention | the engine's; see [`attention`] | the same kernel; torch's |
| log-probabilities | the engine's log-softmax of the logits | [`~head.frozen_head`]; TRL's if the head trains |

Without them, a trainer and a sampler of the same format still differ in the last bits of these operators. Such a bit
can move a quantized activation to the next code, and the difference grows from layer to layer: half of the mismatch
remains.

[`model`] makes a loaded policy compute this way. `rollout/vllm/exact` has the engine's side.
"""
