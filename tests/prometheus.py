"""Runs a real Prometheus, Debian's, against a service of a test."""

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tandem.tests.k8s.manifests import need
from tandem.tests.waits import WAIT

DASHBOARD = (
    Path(__file__).parents[1] / "k8s" / "components" / "monitoring" / "tandem-dashboard.json"
)

VLLM_EXPRESSIONS = [
    # Those of examples/online_serving/prometheus_grafana/grafana.json of vLLM, from the first panel
    # to the last.
    *(
        expression
        for name in (
            "e2e_request_latency_seconds",
            "inter_token_latency_seconds",
            "time_to_first_token_seconds",
        )
        for expression in (
            *(
                f"histogram_quantile({quantile}, sum by(le) "
                f"(rate(vllm:{name}_bucket{{MODEL}}[1m])))"
                for quantile in (0.99, 0.95, 0.9, 0.5)
            ),
            f"rate(vllm:{name}_sum{{MODEL}}[1m]) / rate(vllm:{name}_count{{MODEL}}[1m])",
        )
    ),
    *(f"rate(vllm:{name}_tokens_total{{MODEL}}[1m])" for name in ("prompt", "generation")),
    *(
        f"vllm:{name}{{MODEL}}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ),
    *(
        f"sum by(le) (increase(vllm:request_{name}_tokens_bucket{{MODEL}}[1m]))"
        for name in ("prompt", "generation")
    ),
    "sum by(finished_reason) (increase(vllm:request_success_total{MODEL}[1m]))",
    *(
        f"rate(vllm:request_{name}_time_seconds_sum{{MODEL}}[1m])"
        for name in ("queue", "prefill", "decode")
    ),
    "rate(vllm:request_max_num_generation_tokens_sum{MODEL}[1m])",
    # Others of V1, which newer dashboards show.
    "rate(vllm:request_inference_time_seconds_sum{MODEL}[1m])",
    "histogram_quantile(0.99, sum by(le) "
    "(rate(vllm:request_time_per_output_token_seconds_bucket{MODEL}[1m])))",
    "rate(vllm:prefix_cache_hits_total{MODEL}[1m]) / "
    "rate(vllm:prefix_cache_queries_total{MODEL}[1m])",
]


def vllm_expressions(model_name: str) -> list[str]:
    """Returns every expression of vLLM's dashboard about metrics of V1, with its variables set."""
    return [each.replace("{MODEL}", f'{{model_name="{model_name}"}}') for each in VLLM_EXPRESSIONS]


def dashboard_expressions(model_name: str) -> list[str]:
    """Returns every expression of our dashboard, with its variables set."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [
        each.replace("$model_name", model_name).replace("$__rate_interval", "1m")
        for each in expressions
    ]


@contextmanager
def prometheus(folder: Path, jobs: Mapping[str, Sequence[str]]) -> Iterator["Prometheus"]:
    """Scrapes the targets HOST:PORT of each job while the context is open."""
    config = {
        # A target has as long to answer; a second is too short beside other tests.
        "global": {"scrape_interval": "4s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]}
            for job, targets in jobs.items()
        ],
    }
    path, log = folder / "prometheus.yml", folder / "prometheus.log"
    path.write_text(yaml.safe_dump(config))
    program = need("prometheus", "prometheus")
    arguments = [
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with (
        log.open("w") as output,
        subprocess.Popen([program, *arguments], stderr=output) as process,
    ):
        try:
            deadline = time.monotonic() + WAIT
            while not (found := re.search(r'msg="Listening on" address=(\S+)', log.read_text())):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield Prometheus(f"http://{found[1]}", sum(map(len, jobs.values())))
        finally:
            process.terminate()


class Prometheus:
    """Answers queries about what it has scraped."""

    def __init__(self, url: str, num_targets: int) -> None:
        self._url = url
        self._num_targets = num_targets

    def query(self, expression: str) -> list[float]:
        """Returns the value of each series that the expression has now, but for those that are no
        number; none while Prometheus starts.
        """
        response = httpx.get(
            f"{self._url}/api/v1/query", params={"query": expression}, timeout=WAIT
        )
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return []
        answer: dict[str, Any] = response.json()
        assert answer["status"] == "success", answer
        values = [float(series["value"][1]) for series in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def wait_for(self, expression: str, seconds: float = WAIT) -> list[float]:
        """Returns the series of an expression as soon as there are any."""
        deadline = time.monotonic() + seconds
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"no series: {expression}"
            time.sleep(0.2)
        return found
