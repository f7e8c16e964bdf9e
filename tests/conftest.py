"""Settings that every test runs under."""

import os

import torch

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # of the clusters that tests start by hand
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# OpenMP threads that spin for long while another engine of the process wants the core cost a factor of 5 and more;
# threads that sleep at once cost one of 2.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels of the GPU path run here, too: slowly
