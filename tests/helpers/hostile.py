"""Odd values and texts in the logs of runs."""

import json

from hypothesis import strategies as st


def lines(*rows) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


FILES = ("metrics.jsonl", "trainer_state.json", "settings.json")


FILES += ("checkpoint-7/trainer_state.json", "checkpoint-7/rollout_state.json")


METRICS = ["reward", "mismatch/kl_k3", "mismatch/kl_k1", "mismatch/weight_mean", "mismatch/ess_ratio", "entropy"]


METRICS += ["mismatch/max_weight", "mismatch/cap_fraction", "mismatch/dropped_fraction", "clip_ratio/region_mean"]


METRICS += ["mismatch/unscored_fraction", "frac_reward_zero_std", "completions/clipped_ratio", "ais/alpha"]


METRICS += ["mismatch/by_position/0-15", "mismatch/by_position/16-", "noise/sigma", "noise/effective_sigma"]


METRICS += ["weights/normalized_update", "weights/normalized_quantization_error", "weights/codes_changed"]


METRICS += ["sync_check/bound", "sync_check/logp_difference", "step_time", "num_tokens", "grad_norm", "profiling/x"]


METRICS += ["train_runtime", "eval_reward", "train_mem_gpu_alloc_delta", "sampling/importance_sampling_ratio/mean"]


names = (
    st.sampled_from(METRICS)
    | st.text(max_size=5)
    | st.tuples(st.sampled_from(["profiling/", "mismatch/by_position/"]), st.text(max_size=8)).map("".join)
)
