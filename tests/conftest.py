"""Settings of every test: no hub, no progress bars, deterministic, one set of helpers importable by name."""

import os
import sys
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models; `make test` runs a process per core
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).parent))
