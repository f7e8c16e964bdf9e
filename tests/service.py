"""What tests of a whole service need: where its nodes are, what it should answer, what its workers hold."""

import json
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

NODES: Final = {"router": "127.0.0.2", "prefill": "127.0.0.3", "decode": "127.0.0.4"}
"""The nodes of the test cluster beside its head; each offers the custom resource of its name."""


def expected_tokens(model: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """What transformers generates greedily."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])  # [1, prompt]
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        made.append(out[0, len(prompt) :].tolist())
    return made


def workers(status_url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(status_url, timeout=10) as reply:
        found: list[dict[str, Any]] = json.load(reply)["workers"]
    return found


def wait_until_idle(status_url: str, seconds: float = 10) -> None:
    """Fails unless every worker soon holds no job, lease, transfer or block, with balanced books."""
    deadline = time.monotonic() + seconds
    while True:
        found = workers(status_url)
        assert all(worker["balanced"] for worker in found)
        loads = [worker["load"] for worker in found]
        held = [load["owned_blocks"] + load["leased_blocks"] + load["reserved_blocks"] for load in loads]
        held += [worker["jobs"] + worker["leases"] + worker["transfers"] for worker in found]
        if not any(held):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
