"""QuRL on DAPO's problems: Qwen2.5-Math-7B with an INT8 sampler, ACR and UAQ.

The hyperparameters are the paper's for AIME 2024 (section 5.1). Where the paper is silent, they are those of verl's
script with the same model, batch and 200 steps (recipe/dapo/test_dapo_7b_math.sh). On eight GPUs:

    accelerate launch --config_file configs/accelerate/fsdp2.yaml examples/qurl_dapo.py --output_dir runs/qurl-dapo

On a laptop, with a small stored model and the embedded engine:

    python examples/qurl_dapo.py --config examples/laptop.yaml --steps_per_generation 4

The command line or a YAML file, `--config`, can change every option of the recipe; `--help` lists them all. The
model's config allows 4096 tokens. Set `max_position_embeddings` to 32768 in the config.json of a local copy, as the
script does. The script keeps groups whose rewards are all equal; `--dynamic_sampling_rounds 9` replaces them. Unlike
the script, the recipe has no dual clip, which would undo ACR, and asks for a boxed answer, which `strict_math_reward`
reads.
"""

from qurl import RECIPE as DEEPSCALER

from trl_quant.cli.train import main


RECIPE = DEEPSCALER | {
    "model_name_or_path": "Qwen/Qwen2.5-Math-7B",
    "output_dir": "runs/qurl-dapo",
    "dataset_name": "open-r1/DAPO-Math-17k-Processed",
    "dataset_config": "all",
    "temperature": 1.0,
    # DAPO: clip-higher, a loss over tokens, no KL, overlong completions shaped
    "epsilon_high": 0.28,
    "beta": 0.0,
    "overlong_punishment": 0.5,  # the last 4096 tokens
    # 512 prompts with 16 completions each, 200 times, used in 16 updates; on eight GPUs 8 x 64 completions an update
    "num_generations": 16,
    "steps_per_generation": 1024,
    "max_steps": 3200,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 160,  # 10 generations
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}


if __name__ == "__main__":
    main(recipe=RECIPE)
