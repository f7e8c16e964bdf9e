"""Settings that every test runs under."""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# OpenMP threads that spin while another engine of the same process wants the core cost a factor of 5 and more.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
