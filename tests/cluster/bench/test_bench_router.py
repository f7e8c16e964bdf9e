"""`python -m tandem.cluster.bench.router` measures the router with what callers need to be let in."""

import json
import subprocess
import sys


def test_it_measures_callers_with_keys_over_tls() -> None:
    command = [sys.executable, "-m", "tandem.cluster.bench.router", "run", "--keys", "--tls", "--json"]
    sizes = ["--streams", "2", "--tokens", "8", "--rounds", "1"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    costs = json.loads(done.stdout)
    assert [(cost["api"], cost["num_streams"]) for cost in costs] == [("grpc", 2), ("http", 2)]
    assert all(cost["tokens_per_second"] > 0 for cost in costs)
