"""Settings of papers that several tests compare recipes with."""

AIS = {  # in both of its experiments
    "rollout_precision": "fp8_tensor",
    "is_correction": "ais",
    "is_cap": 5,
    "ais_delta": 0.02,
    "ais_gamma": 1.2,
    "scale_rewards": "none",
    "loss_type": "grpo",
    "epsilon": 0.2,
}
