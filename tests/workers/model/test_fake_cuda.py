"""Launches steps of every family and format on a fake GPU: no host sync, no tensor elsewhere."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tandem.tests.bench.engine.adapters import random_adapter
from tandem.tests.tiny import FAMILIES, ROUTED, STATEFUL, tiny_config
from tandem.tests.tiny_tokenizer import make_tokenizer
from tandem.tests.watermarks import WATERMARK
from tandem.tests.workers.model.fake_cuda import HostSync, Watch, WrongDevice, fake_cuda, real
from tandem.tests.workers.model.helpers import GREEDY, Driver, prompt
from tandem.tests.workers.spans import as_table, span
from tandem.workers.engine.plan import PENDING_TOKEN, SamplingParams, SequenceStep, StepPlan
from tandem.workers.kv_cache.layout import GPU_QUANTIZED, KvLayout, LayerGeometry
from tandem.workers.model import adapter, graphs
from tandem.workers.model.adapter import AdapterTable
from tandem.workers.model.attention.backend import PLAIN, AttentionOptions
from tandem.workers.model.config import Fields, ModelConfig
from tandem.workers.model.generic import attention
from tandem.workers.model.generic.attention import PagedLayers, TracedLayer
from tandem.workers.model.kernels.triton.elementwise import rms_norm
from tandem.workers.model.kv import store as kv_store
from tandem.workers.model.kv.store import HostBlocks, PagedKv
from tandem.workers.model.layers.experts import RoutedExperts
from tandem.workers.model.layers.linear import RowParallelLinear
from tandem.workers.model.loader import build_model, load_weights, rank_weight_bytes
from tandem.workers.model.module import all_parameters
from tandem.workers.model.parallel import TensorParallel
from tandem.workers.model.quant.int4 import FEW_ROWS, Int4LinearMethod
from tandem.workers.model.quant.scaled import ScaledLinearMethod
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod
from tandem.workers.model.registry import MODELS, parse_model_config, with_quantization
from tandem.workers.model.runner import ModelRunner

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu launches the same steps on the GPU itself"
)

CUDA: Final = torch.device("cuda")

SAMPLING: Final = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.7),
    "filters": SamplingParams(top_k=9, top_p=0.8, min_p=0.1, seed=1),
    "typical": SamplingParams(typical_p=0.9),
    "penalties": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2
    ),
    "bias": SamplingParams(
        logit_bias=((3, 2.0),), bad_words=((4,), (5, 6)), stop_ids=(1,), min_length=35
    ),
    "watermark": SamplingParams(watermark=WATERMARK),
    "logprobs": SamplingParams(logprobs=3, prompt_logprobs=2),
    "processed": SamplingParams(temperature=0.0, logprobs=3, processed_logprobs=True),
    "processed_filters": SamplingParams(
        top_p=0.8, bad_words=((4,),), logprobs=3, processed_logprobs=True
    ),
    "pooling": SamplingParams(temperature=0.0, pooling="mean"),
}

_INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}
_ACTIVATIONS = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}


def compressed(form: str, weights: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the quantization_config of a checkpoint of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, **options}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: Final[dict[str, dict[str, Any]]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True},
    "gptq_128": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False},
    "act_order": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "desc_act": True,
        "sym": True,
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    },
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
    "fp8_blocks": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
    },
    "fp8_of_64": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [64, 64],
        "activation_scheme": "dynamic",
    },
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "int_quantized": compressed(
        "int-quantized",
        {**_INTEGERS, "strategy": "channel", "dynamic": False},
        input_activations={**_ACTIVATIONS, "type": "int"},
    ),
    "float_quantized": compressed(
        "float-quantized",
        {**_INTEGERS, "type": "float", "strategy": "channel", "dynamic": False},
        input_activations={**_ACTIVATIONS, "type": "float"},
    ),
    "pack_quantized": compressed(
        "pack-quantized",
        {**_INTEGERS, "num_bits": 4, "strategy": "group", "group_size": 32, "dynamic": False},
    ),
}


INT4: Final = ("gptq_128", "awq", "pack_quantized")  # that GPUs multiply without restoring them
SIZES: Final = {"hidden_size": 128, "intermediate_size": 256}  # whole groups of each format


@pytest.fixture
def watch() -> Iterator[Watch]:
    with fake_cuda() as found:
        yield found


def config_of(family: str, **overrides: Any) -> ModelConfig:
    """Parses the config.json of a tiny model."""
    config = tiny_config(family, make_tokenizer(), {})
    values = json.loads(config.to_json_string())
    model_type: Any = AutoModelForCausalLM._model_mapping[type(config)]
    architecture = model_type.__name__
    return parse_model_config(
        Fields("config.json", values | {"architectures": [architecture]} | overrides)
    )


class FakeGroup:
    """Stands for a group of two ranks; the other one has the same numbers."""

    rank = 0
    size = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, x]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x


def load(
    watch: Watch,
    config: ModelConfig,
    *,
    group: FakeGroup | None = None,
    batch_invariant: bool = False,
    num_host_blocks: int = 0,
    cache_dtype: str = "auto",
) -> ModelRunner:
    """Builds a runner in bfloat16 without numbers."""
    build = real(build_model)
    tp = TensorParallel(group)
    with watch.loading():
        model = build(
            config, torch.bfloat16, tp, batch_invariant=batch_invariant, device_type="cuda"
        )
        load_weights(model, lambda part, target: None, CUDA)
        layout = KvLayout(layers=config.layers, dtype="bfloat16", model="", cache_dtype=cache_dtype)
        kv = PagedKv(layout, num_blocks=128, block_size=16, device=CUDA, tp=tp.size, rank=tp.rank)
        adapters = AdapterTable(
            model.lora, dtype=torch.bfloat16, device=CUDA, batch_invariant=batch_invariant
        )
        host = HostBlocks(kv, num_host_blocks) if num_host_blocks else None
        return ModelRunner(
            config,
            model,
            kv,
            adapters=adapters,
            host=host,
            group=group,
            batch_invariant=batch_invariant,
        )


def record(launch: graphs.Launch) -> tuple[Callable[[], object], torch.Tensor]:
    """Stands for a capture; a replay computes nothing."""
    return (lambda: None), launch()


def launch(driver: Driver, *steps: SequenceStep, **fields: Any) -> None:
    """Launches a plan, and does not collect its results: they have no numbers."""
    plan = StepPlan(sequences=steps, **({"dropped": ()} | fields))
    driver.runner.launch(plan)


def run_steps(runner: ModelRunner, *kinds: SamplingParams, **fields: Any) -> None:
    """Launches chunks, decodes beside a chunk, decodes alone, drafts, copies and the end."""
    driver = Driver(runner)
    ids = range(len(kinds))
    launch(driver, driver.step(100, prompt(40), 0, num_samples=0))
    launch(driver, *(driver.step(each, prompt(20), 0, kinds[each], **fields) for each in ids))
    mixed = [driver.step(each, [PENDING_TOKEN], 20) for each in ids]
    launch(driver, driver.step(100, prompt(9), 40), *mixed)
    for start in (21, 22):
        launch(driver, *(driver.step(each, [PENDING_TOKEN], start) for each in ids))
    drafts = [driver.step(each, [5, 6, 7], 23, num_samples=3, num_draft=2) for each in ids]
    if not any(kind.pooling for kind in kinds):
        launch(driver, *drafts, driver.step(100, [7], 49))
    launch(driver, copies=((1, 2), (3, 4)))
    launch(driver, dropped=(*ids, 100))


def test_every_tree_has_a_family_here() -> None:
    """Architectures that transformers does not have are other names of these trees."""
    trees = {MODELS[config_of(family).architecture].build for family in FAMILIES}
    assert trees == {family.build for family in MODELS.values()}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(STATEFUL)))
def test_families(watch: Watch, family: str) -> None:
    """Captured decodes, and eager steps beside them; Llama with all kinds of sampling at once."""
    runner = load(watch, config_of(family))
    assert not any(module.waits_for_device for module in runner._model.modules())
    kinds = [SAMPLING[name] for name in ("greedy", "filters", "logprobs")]
    if family == "llama":
        kinds = [kind for kind in SAMPLING.values() if not kind.pooling]
    runner.capture_graphs(record, (len(kinds), 2))
    run_steps(runner, *kinds)
    assert runner.num_graph_replays() == 2
    assert {"_decode_kernel", "_chunk_kernel", "_store_kv_kernel"} <= watch.launched


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(STATEFUL)))
def test_families_over_two_ranks(watch: Watch, family: str) -> None:
    runner = load(watch, config_of(family), group=FakeGroup())
    runner.capture_graphs(record, (2,))
    run_steps(runner, GREEDY, GREEDY)
    assert runner.num_graph_replays() == 2


def test_heads_that_transformers_does_not_split(watch: Watch) -> None:
    """Each rank attends for its part."""
    module = nn.Identity()
    geometry = LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=8)
    traced = TracedLayer(module=module, geometry=geometry)
    layers = PagedLayers([traced], TensorParallel(FakeGroup()))
    query, key = (torch.empty(1, num_heads, 5, 8, device=CUDA) for num_heads in (4, 2))

    def attend(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        assert key is not None
        assert (query.shape, key.shape) == ((5, 2, 8), (5, 1, 8))
        return query.flatten(1)

    with watch.loading():
        layers.process_after_load(CUDA)
    with layers.step(attend, None):
        result, _ = attention._attend(module, query, key, key, None)
    assert result.shape == (1, 5, 4, 8)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampling(watch: Watch, sampling: str) -> None:
    """Each kind alone, because a batch of equal kinds takes other ways through the sampler."""
    runner = load(watch, config_of("llama", num_hidden_layers=1))
    run_steps(runner, SAMPLING[sampling])
    run_steps(runner, *[SAMPLING[sampling]] * 3)
    assert "_sample_kernel" in watch.launched


@pytest.mark.parametrize("form", FORMATS)
def test_checkpoint_formats(watch: Watch, form: str) -> None:
    config = config_of("llama", num_hidden_layers=1, quantization_config=FORMATS[form])
    run_steps(load(watch, config), GREEDY, GREEDY)


def test_weights_rounded_to_fp8(watch: Watch) -> None:
    """Layers are multiplied in FP8, and so are experts, in one launch."""
    for family in ("llama", "mixtral"):
        config = with_quantization(config_of(family), "fp8")
        runner = load(watch, config)
        methods = [each for each in runner._model.modules() if isinstance(each, ScaledLinearMethod)]
        assert any(each.plain_form() is None for each in methods)
        assert not any(module.waits_for_device for module in runner._model.modules())
        runner.capture_graphs(record, (2,))
        run_steps(runner, GREEDY, GREEDY)
        assert "_quantize_kernel" in watch.launched


@pytest.mark.parametrize("form", [*INT4, "rounded"])
def test_weights_of_four_bits(watch: Watch, form: str) -> None:
    """Single tokens are multiplied by the numbers, long chunks by the weights in bfloat16."""
    config = config_of("llama", **SIZES, quantization_config=FORMATS.get(form))
    if form == "rounded":
        config = with_quantization(config, "int4")
    runner = load(watch, config)
    methods = [each for each in runner._model.modules() if isinstance(each, Int4LinearMethod)]
    assert len(methods) == 4 * len(config.layers)
    assert all(each._plain is None for each in methods)
    runner.capture_graphs(record, (2,))
    run_steps(runner, GREEDY, GREEDY)
    assert "_restore_kernel" not in watch.launched
    driver = Driver(runner)
    launch(driver, driver.step(1, prompt(FEW_ROWS + 1), 0))
    assert "_restore_kernel" in watch.launched


@pytest.mark.parametrize(
    ("form", "rounded", "exact"),
    [(form, None, False) for form in ("fp8", "fbgemm_fp8", "float_quantized", "fp8_blocks", *INT4)]
    + [(None, "fp8", False), (None, "int4", False), ("gptq", None, False)]
    + [(form, None, True) for form in ("float_quantized", *INT4)],
)
def test_the_plan_counts_the_bytes_that_a_gpu_keeps(
    watch: Watch, form: str | None, rounded: str | None, exact: bool
) -> None:
    """Two bytes for each number where blocks share a scale, where groups are too small, and where
    numerics are exact.
    """
    config = config_of("llama", **SIZES, quantization_config=form and FORMATS[form])
    if rounded is not None:
        config = with_quantization(config, rounded)
    tree = load(watch, config, batch_invariant=exact)._model
    modules = list(tree.modules())
    scaled = [each for each in modules if isinstance(each, ScaledLinearMethod)]
    packed = [each for each in modules if isinstance(each, Int4LinearMethod)]
    plain = [each for each in modules if isinstance(each, UnquantizedLinearMethod)]
    assert bool(scaled or packed) == (form not in ("fp8_blocks", "gptq") and not exact)
    kept = sum(each._numbers.nbytes + each._scales.nbytes for each in scaled)
    kept += sum(each._words.nbytes + each._terms.nbytes for each in packed)
    parameters = {id(each): each for each in all_parameters(tree)}
    for each in plain:
        parameters.setdefault(id(each.weight), each.weight)
    kept += sum(each.data.nbytes for each in parameters.values())
    counted = real(rank_weight_bytes)(config, "bfloat16", 1, 0, "cuda", batch_invariant=exact)
    assert counted == kept


def test_experts_in_checkpoint_formats(watch: Watch) -> None:
    for family, form in (("mixtral", FORMATS["gptq"]), ("gpt_oss", {"quant_method": "mxfp4"})):
        sizes = {"intermediate_size": 96}
        runner = load(watch, config_of(family, quantization_config=form, **sizes))
        assert not any(module.waits_for_device for module in runner._model.modules())
        run_steps(runner, GREEDY)


def test_batch_invariant_steps(watch: Watch) -> None:
    runner = load(watch, config_of("llama"), batch_invariant=True)
    runner.capture_graphs(record, (2,))
    run_steps(runner, GREEDY, SAMPLING["filters"])
    assert runner.num_graph_replays() == 2
    assert "_linear_kernel" in watch.launched


def check_experts(watch: Watch, runner: ModelRunner) -> None:
    """Our kernel multiplies by all experts in one launch, also within a graph."""
    assert not any(module.waits_for_device for module in runner._model.modules())
    runner.capture_graphs(record, (2,))
    run_steps(runner, GREEDY, GREEDY)
    assert runner.num_graph_replays() == 2
    assert {"_grouped_kernel", "_combine_kernel"} <= watch.launched


@pytest.mark.parametrize("family", ROUTED)
def test_batch_invariant_experts(watch: Watch, family: str) -> None:
    check_experts(watch, load(watch, config_of(family), batch_invariant=True))


def test_experts_of_gpus_for_which_torch_has_no_kernel(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    check_experts(watch, load(watch, config_of("mixtral")))


@pytest.mark.parametrize(
    ("form", "exact"),
    [("fp8", False), ("fp8", True), ("fp8_of_64", False), ("fp8_of_64", True), ("rounded", False)],
)
def test_experts_in_fp8(watch: Watch, form: str, exact: bool) -> None:
    """The plan counts their numbers and scales."""
    config = config_of("mixtral", **SIZES, quantization_config=FORMATS.get(form))
    if form == "rounded":
        config = with_quantization(config, "fp8")
    runner = load(watch, config, batch_invariant=exact)
    tree = runner._model
    kept = 0
    parameters = {id(each): each for each in all_parameters(tree)}
    for each in tree.modules():
        if isinstance(each, UnquantizedLinearMethod):
            parameters.setdefault(id(each.weight), each.weight)
        elif isinstance(each, ScaledLinearMethod):
            kept += each._numbers.nbytes + each._scales.nbytes
        elif isinstance(each, RoutedExperts):
            assert each._grouped is not None
            for stack in each._grouped:
                assert stack._weight.dtype is torch.float8_e4m3fn
                assert stack._scales is not None
                kept += stack._weight.nbytes + stack._scales.nbytes
    kept += sum(each.data.nbytes for each in parameters.values())
    counted = real(rank_weight_bytes)(config, "bfloat16", 1, 0, "cuda", batch_invariant=exact)
    assert counted == kept
    check_experts(watch, runner)


def test_experts_in_several_formats_wait(watch: Watch) -> None:
    """They are multiplied one by one, and no capture is tried."""
    form = {**FORMATS["fp8_of_64"], "modules_to_not_convert": ["experts.0"]}
    runner = load(watch, config_of("mixtral", **SIZES, quantization_config=form))
    assert any(module.waits_for_device for module in runner._model.modules())
    with pytest.raises(HostSync):
        run_steps(runner, GREEDY)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_adapters(watch: Watch, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with an adapter beside rows without, adjacent and not."""
    config = config_of(family)
    monkeypatch.setattr(adapter, "_read_factors", real(adapter._read_factors))
    runner = load(watch, config)
    assert runner._model.lora is not None
    folder = real(random_adapter)(config, 4)
    with watch.loading():
        for number in (1, 2):
            runner.adapters.load(number, folder)
    run_steps(runner, GREEDY, SAMPLING["filters"], adapter=1)
    driver = Driver(runner)
    for start in (0, 20):
        ids = [PENDING_TOKEN] if start else prompt(20)
        which = (1, 0, 1, 2)
        steps = [driver.step(each, ids, start, adapter=which[each]) for each in range(4)]
        launch(driver, *steps)
    launch(driver, dropped=tuple(range(4)), unloaded=(1, 2))


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_host_tier(watch: Watch, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "pinned_memory", _pinned)  # CUDA's own call needs a GPU
    monkeypatch.setattr(kv_store, "unpin", lambda _memory, _device: None)
    runner = load(watch, config_of(family), num_host_blocks=8)
    driver = Driver(runner)
    launch(driver, driver.step(1, prompt(40), 0))
    launch(driver, saved=((driver.tables[1][0], 3), (driver.tables[1][1], 4)))
    launch(driver, driver.step(1, [PENDING_TOKEN], 40), loaded=((3, driver.free[0]),))


@pytest.mark.parametrize("cache_dtype", GPU_QUANTIZED)
def test_quantized_caches(watch: Watch, cache_dtype: str) -> None:
    runner = load(watch, config_of("llama"), cache_dtype=cache_dtype)
    runner.capture_graphs(record, (8, 2))
    run_steps(runner, GREEDY, GREEDY)
    assert runner.num_graph_replays() == 2


@pytest.mark.parametrize("cache_dtype", ["auto", *GPU_QUANTIZED])
async def test_transfers(watch: Watch, cache_dtype: str) -> None:
    """A read is awaited; a write waits for nothing."""
    kv = load(watch, config_of("llama"), cache_dtype=cache_dtype).kv
    part = span(kv, 3, 30)
    data = await kv.read(as_table([5, 2, 9]), part)
    kv.write(as_table([1, 4, 8]), part, data)
    copy = await kv.gather(as_table([5, 2, 9]), part)
    kv.scatter(as_table([1, 4, 8]), part, copy)


class Fault:
    """Faults that a layer may have; each takes the layer's input [num_tokens, hidden]."""

    @staticmethod
    def tolist(x: torch.Tensor) -> None:
        x.tolist()

    @staticmethod
    def item(x: torch.Tensor) -> None:
        x[0, 0].item()

    @staticmethod
    def branch(x: torch.Tensor) -> None:
        assert x.sum() >= 0

    @staticmethod
    def nonzero(x: torch.Tensor) -> None:
        torch.where(x > 0)

    @staticmethod
    def mask(x: torch.Tensor) -> None:
        x[x > 0]

    @staticmethod
    def cpu(x: torch.Tensor) -> None:
        x.cpu()

    @staticmethod
    def blocking(x: torch.Tensor) -> None:
        torch.zeros(3).pin_memory().to(x.device)

    @staticmethod
    def not_pinned(x: torch.Tensor) -> None:
        torch.zeros(3).to(x.device, non_blocking=True)

    @staticmethod
    def host_index(x: torch.Tensor) -> None:
        x[torch.tensor([0])]


def damage(monkeypatch: pytest.MonkeyPatch, fault: Callable[[torch.Tensor], object]) -> None:
    """Makes every row-parallel layer do `fault` to its input first."""
    multiply = RowParallelLinear.__call__

    def call(layer: RowParallelLinear, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        fault(x)
        return multiply(layer, x, *rest)

    monkeypatch.setattr(RowParallelLinear, "__call__", call)


@pytest.mark.parametrize("fault", [name for name in vars(Fault) if not name.startswith("_")])
def test_a_host_sync_in_a_layer_is_caught(
    watch: Watch, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(watch, config_of("llama"))
    damage(monkeypatch, getattr(Fault, fault))
    with pytest.raises(HostSync):
        run_steps(runner, GREEDY)


def test_a_tensor_that_stays_in_host_memory_is_caught(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an operand of torch's operations and of a Triton kernel."""
    runner = load(watch, config_of("llama"))
    damage(monkeypatch, lambda x: x + torch.zeros(x.shape))
    with pytest.raises(RuntimeError, match=r"two .*devices"):
        run_steps(runner, GREEDY)
    damage(monkeypatch, lambda x: rms_norm(x, torch.zeros(x.shape[1]), 1e-5))
    with pytest.raises(WrongDevice):
        run_steps(runner, GREEDY)
