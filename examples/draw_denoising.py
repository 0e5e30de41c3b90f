"""Draws how a canvas is denoised, as in docs/diffusion.md: each row is a step, each colour the step that wrote a token.

python examples/build_masked_model.py --output_dir runs/masked
python examples/draw_denoising.py runs/masked docs/denoising.png
"""

import sys
from pathlib import Path

import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_quant.rollout.embedded.diffusion import Schedule, denoise


sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from palette import save_picture


SCHEDULE = Schedule(length=8, block_length=8, tokens_per_step=1, temperature=0.0)
PROMPTS = ["34+58=", "40+12=", "67+45="]
MASKED = "#e8e8e8"


def canvases(model, tokenizer) -> list[list[list[str]]]:
    """Returns the tokens of each prompt's canvas at the start and after each step."""
    prompts, steps = torch.tensor(tokenizer(PROMPTS)["input_ids"]), []
    steps.append(torch.full((len(PROMPTS), SCHEDULE.length), tokenizer.mask_token_id))
    mask = torch.ones_like(prompts)
    denoise(model, prompts, mask, SCHEDULE, tokenizer.mask_token_id, [], lambda canvas: steps.append(canvas.clone()))
    return [[tokenizer.convert_ids_to_tokens(canvas[row].tolist()) for canvas in steps] for row in range(len(PROMPTS))]


def draw(found: list[list[list[str]]], mask: str, end: str) -> Figure:
    """Draws a panel for each prompt: places from left to right, steps from top to bottom."""
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True)
    shares = [step / SCHEDULE.steps for step in range(SCHEDULE.steps + 1)]
    colours = [to_hex((0.98 - 0.65 * share, 0.80 - 0.25 * share, 0.35 + 0.50 * share)) for share in shares]
    for panel, prompt, steps in zip(panels, PROMPTS, found, strict=True):
        for place in range(SCHEDULE.length):
            written = next(step for step, canvas in enumerate(steps) if canvas[place] != mask)
            for step, canvas in enumerate(steps):
                colour = MASKED if step < written else colours[written]
                panel.add_patch(Rectangle((place, step), 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
                if step >= written:
                    text = {end: "end", " ": "\N{OPEN BOX}"}.get(canvas[place], canvas[place])
                    weight = "bold" if step == written else "normal"
                    panel.text(place + 0.5, step + 0.5, text, ha="center", va="center", fontsize=6.5, weight=weight)
        panel.set(title=prompt, xlim=(0, SCHEDULE.length), ylim=(len(steps), 0), xticks=[], aspect="equal")
        panel.set_yticks([step + 0.5 for step in range(len(steps))], range(len(steps)))
    panels[0].set_ylabel("steps")
    return figure


if __name__ == "__main__":
    source, target = sys.argv[1:]
    texts = AutoTokenizer.from_pretrained(source)
    found = canvases(AutoModelForCausalLM.from_pretrained(source), texts)
    save_picture(draw(found, texts.mask_token, texts.eos_token), Path(target), dpi=110)
