"""Saves pictures as PNG files with a palette of 64 colours: they look the same, in a quarter of the bytes.

python benchmarks/palette.py notebooks/noise.ipynb    # the pictures that a notebook has stored
"""

import base64
import io
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from trl_quant.storage.whole import write_whole


def with_palette(picture: Image.Image) -> bytes:
    """Returns a PNG file of the picture."""
    few = picture.convert("RGB").quantize(64, kmeans=2, dither=Image.Dither.NONE)
    few.save(file := io.BytesIO(), format="PNG", optimize=True)
    return file.getvalue()


def save_picture(figure: Figure, path: Path, dpi: int = 100) -> None:
    figure.savefig(file := io.BytesIO(), format="png", dpi=dpi)
    write_whole(path, with_palette(Image.open(file)))


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        notebook = json.loads(path.read_text())
        for output in (output for cell in notebook["cells"] for output in cell.get("outputs", [])):
            if picture := output.get("data", {}).get("image/png"):
                file = io.BytesIO(base64.b64decode("".join(picture)))
                output["data"]["image/png"] = base64.b64encode(with_palette(Image.open(file))).decode()
        write_whole(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
