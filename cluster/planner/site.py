"""Describes the machines of a plan: what a split of workers is, and what its steps take."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from ...proto.errors import InvalidArgument
from ...workers.engine.config import Budgets, EngineConfig, has_burst_chunks
from ...workers.kv_cache.memory import table_costs
from ...workers.kv_cache.tables import plan_tables
from ...workers.model.costs.inference import InferenceCost, Work
from ...workers.model.costs.roofline import Device
from ...workers.model.footprint import (
    CacheBytes,
    check_config_split,
    kv_bytes_per_token,
    memory_budget,
)
from ..config import TandemConfig
from ..sim.cost import ServiceCosts, StepCosts, StepWork
from ..sim.service import SimulatedPool, SimulatedService
from .profile import Profile
from .workload import PlannedWorkload

_BANDWIDTH_EFFICIENCY: Final = 0.75
_COMPUTE_EFFICIENCY: Final = 0.5
_TP_EFFICIENCY: Final = 0.9  # of each doubling of the ranks
_HOST_SECONDS: Final = 1e-3  # of each step
_TRANSFER_SECONDS: Final = 2e-3
_TRANSFER_BYTES_PER_S: Final = 25e9  # of a network of 200 Gbit/s
_ROUTER_SECONDS_PER_REQUEST: Final = 1e-3
_ROUTER_SECONDS_PER_TOKEN: Final = 3e-5


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Names the workers of a service; without prefill workers, decode workers do both."""

    prefill: int
    decode: int
    tp: int = 1

    def __str__(self) -> str:
        tp = f" with tp {self.tp}" if self.tp > 1 else ""
        if not self.prefill:
            return f"together on {self.decode}{tp}"
        return f"{self.prefill} + {self.decode}{tp}"

    @property
    def num_ranks(self) -> int:
        return (self.prefill + self.decode) * self.tp


class Site(Protocol):
    """Knows the machines on which a service is planned."""

    def service(self, split: Split) -> tuple[SimulatedService, ServiceCosts]:
        """Returns a service with a split's workers, and its costs.

        Raises InvalidArgument for a split that is not measured, or does not fit.
        """
        ...

    def num_devices(self, split: Split) -> int:
        """Returns the number of devices that a split takes: what it costs."""
        ...

    @property
    def description(self) -> str:
        """Returns the source of the costs, as text."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredSite:
    """Holds a machine that `tandem plan measure` has measured."""

    profile: Profile

    def service(self, split: Split) -> tuple[SimulatedService, ServiceCosts]:
        profile = self.profile
        if split.tp != profile.tp:
            raise InvalidArgument(
                f"{split.tp} is not measured, only {profile.tp}; run `tandem plan measure MODEL "
                f"--tp {split.tp}`",
                "--tp",
            )
        costs = profile.costs(split.prefill, split.decode)
        worker = profile.worker(split.prefill + split.decode)
        pool = SimulatedPool(
            workers=split.decode,
            num_blocks=worker.num_blocks,
            budgets=worker.budgets.as_budgets(split.prefill),
            overlap=worker.overlap,
        )
        service = SimulatedService(
            decode=pool,
            prefill=replace(pool, workers=split.prefill) if split.prefill else None,
            token_bytes=profile.token_bytes,
            tables=profile.tables,
            context_tokens=worker.context_tokens,
            block_size=worker.block_size,
        )
        return service, costs

    def num_devices(self, split: Split) -> int:
        """Returns the number of GPUs. All workers on CPUs share the cores of one machine."""
        return 1 if self.profile.device == "cpu" else split.num_ranks

    @property
    def description(self) -> str:
        profile = self.profile
        errors = ", ".join(
            f"{each.workers} x {each.threads} threads: {each.fit().mean_error:.1%}"
            for each in profile.workers
        )
        return (
            f"measured on {profile.device_name}, {profile.date[:10]}, commit {profile.commit}; "
            f"leave-one-out error of steps ({errors})"
        )


@dataclass(frozen=True, slots=True)
class ArithmeticSite:
    """Holds devices whose steps follow from a roofline and stated efficiencies."""

    config: TandemConfig
    cost: InferenceCost
    name: str
    device: Device
    typical_tokens: int  # of a sequence

    def service(self, split: Split) -> tuple[SimulatedService, ServiceCosts]:
        engine = self._engine_config(split)
        budgets = engine.budgets
        if not engine.num_blocks:
            raise InvalidArgument(
                f"{split.tp} x {self.device.memory_gb} GB do not hold the weights, "
                f"{self.cost.sizes.weight_bytes / 1e9:.0f} GB, and a KV cache; raise --tp",
                "--tp",
            )
        decode = SimulatedPool(
            workers=split.decode,
            num_blocks=engine.num_blocks,
            budgets=budgets,
            overlap=engine.overlap,
        )
        service = SimulatedService(
            decode=decode,
            prefill=replace(decode, workers=split.prefill) if split.prefill else None,
            token_bytes=self.cost.kv_bytes_per_token,
            tables=table_costs(self.cost.layout, engine.tables),
            context_tokens=min(self.cost.config.max_position_embeddings, engine.capacity_tokens),
            block_size=engine.block_size,
            router=self.config.router,
        )
        steps = self._steps(split.tp)
        return service, ServiceCosts(
            prefill=steps,
            decode=steps,
            router_seconds_per_request=_ROUTER_SECONDS_PER_REQUEST,
            router_seconds_per_token=_ROUTER_SECONDS_PER_TOKEN,
            transfer_seconds=_TRANSFER_SECONDS,
            transfer_bytes_per_second=_TRANSFER_BYTES_PER_S,
        )

    def num_devices(self, split: Split) -> int:
        return split.num_ranks

    def holds(self, tp: int, num_tokens: int) -> bool:
        """Returns True if `tp` devices hold the weights and a sequence of `num_tokens`.

        Raises InvalidArgument if the model cannot be divided among `tp` ranks.
        """
        return self._engine_config(Split(0, 1, tp)).capacity_tokens >= num_tokens

    @property
    def description(self) -> str:
        return (
            f"arithmetic, not measured: {self.name} with {_BANDWIDTH_EFFICIENCY:.0%} of its "
            f"bandwidth, {_COMPUTE_EFFICIENCY:.0%} of its products, {_TP_EFFICIENCY:.0%} for each "
            f"doubling of tp, {1e3 * _HOST_SECONDS:g} ms of host time in a step, and transfers of "
            f"{_TRANSFER_BYTES_PER_S / 1e9:g} GB/s"
        )

    def _steps(self, tp: int) -> StepCosts:
        """Returns the sum of the parts of the roofline: no part hides behind another.

        A token of context costs what one more token does at `typical_tokens`. Windows that are full
        there are read for each sequence. Times of other lengths may be too long, not too short.
        """
        cost = self.cost
        layout = cost.layout
        speed = tp * _TP_EFFICIENCY ** (tp.bit_length() - 1)
        read = speed * _BANDWIDTH_EFFICIENCY * self.device.roofline.bytes_per_s
        multiply = speed * _COMPUTE_EFFICIENCY * self.device.roofline.flops_per_s
        # Several ranks may hold the same keys and values; each reads its own.
        rank_bytes = kv_bytes_per_token(cost.config, tp, layout.dtype, layout.cache_dtype)
        copies = tp * rank_bytes / max(cost.kv_bytes_per_token, 1)
        empty = cost.decode(0)
        context, windows = self._context_work()
        # Of a prompt, only the last token computes logits: the one of `each_sequence`.
        prompt_token = cost.prefill(2).flops - cost.prefill(1).flops + windows.flops
        return StepCosts(
            fixed=_HOST_SECONDS + cost.decode(0, 0).num_bytes / read,
            each_sequence=(2 * layout.bytes_per_state + copies * windows.num_bytes) / read
            + empty.flops / multiply,
            each_context_token=copies * context.num_bytes / read,
            each_prompt_token=prompt_token / multiply,
            each_prompt_context=context.flops / multiply,
            expert_seconds=cost.expert_bytes / read,
            chosen_share=cost.sizes.chosen_share,
        )

    def _context_work(self) -> tuple[Work, Work]:
        """Returns the work of a token of context, and the work of the windows that are full.

        Their sum for `typical_tokens` is the work of a decode that attends to so many.
        """
        tokens = self.typical_tokens
        empty, here, longer = map(self.cost.decode, (0, tokens, tokens + 1))
        each = Work(longer.num_bytes - here.num_bytes, longer.flops - here.flops)
        full = Work(
            here.num_bytes - empty.num_bytes - tokens * each.num_bytes,
            here.flops - empty.flops - tokens * each.flops,
        )
        return each, full

    def _num_blocks(self, tp: int) -> int:
        """Returns the KV blocks of a rank; 0 if its memory has no room beside the weights.

        Raises InvalidArgument if the model cannot be divided among `tp` ranks.
        """
        pool = self.config.decode
        total = memory_budget(self.device.memory_gb * 10**9, 1.0, pool.gpu_memory_utilization)
        rest = total - self.cost.sizes.weight_bytes // tp
        try:
            check_config_split(self.cost.config, tp)
            cache = CacheBytes.of(self.cost.layout, tp, block_size=pool.block_size)
        except ValueError as error:
            raise InvalidArgument(str(error).removeprefix("tp: "), "--tp") from None
        max_sequences = self.config.max_sequences(pool)
        with suppress(ValueError):  # no room for the state of a sequence
            counts = cache.split(rest, state_slots=None, max_sequences=max_sequences, least=1)
            return counts.num_blocks
        return 0

    def _engine_config(self, split: Split) -> EngineConfig:
        """Returns the configuration of a worker's engine, without blocks if none fits.

        Raises InvalidArgument if the model cannot be divided among the split's ranks.
        """
        config, pool = self.config, self.config.decode
        return EngineConfig(
            num_blocks=self._num_blocks(split.tp),
            block_size=pool.block_size,
            tables=plan_tables(self.cost.layout, pool.block_size),
            overlap=True,
            budgets=Budgets(
                chunk_tokens=config.chunk_tokens(pool, 0),
                mixed_chunk_tokens=config.mixed_chunk_tokens(pool),
                mixed_step_factor=pool.mixed_step_factor,
                burst_chunks=has_burst_chunks(split.prefill),
                max_sequences=config.max_sequences(pool),
            ),
        )


def check_workload(
    split: Split, service: SimulatedService, costs: ServiceCosts, workload: PlannedWorkload
) -> None:
    """Raises InvalidArgument if a sequence is too long, or a step is outside the measured grid."""
    if workload.longest > service.context_tokens:
        raise InvalidArgument(
            f"the longest sequence has {workload.longest:,} tokens; a worker of {split} holds at "
            f"most {service.context_tokens:,}; lower --input-len, --output-len or --length-scale"
        )
    chunk = min(workload.longest_input, service.decode.budgets.chunk_tokens)
    worst = StepWork(sequences=1) + StepWork.of_prompt(workload.longest_input - chunk, chunk)
    if found := costs.decode.outside(worst):
        raise InvalidArgument(
            f"steps of {split} are outside the measured grid ({'; '.join(found)}); run `tandem "
            f"plan measure MODEL --context-tokens {workload.longest}`, with more --seconds for a "
            "slow model",
            "--profile",
        )
