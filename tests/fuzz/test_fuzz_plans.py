"""The same for the plans that rank 0 broadcasts, whose module needs torch."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.tests.fuzz.mutations import inputs
from tandem.tests.fuzz.targets import Target
from tandem.workers.engine.plan import SamplingParams, SequenceStep, StepPlan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.tp.process_group import EMPTY_PLAN, decode_plan, encode_plan

STEP = SequenceStep(
    sequence_id=1,
    token_ids=(1, 2),
    start=0,
    new_blocks=(TableBlocks((3, 4)),),
    sampling=SamplingParams(temperature=0.5, seed=7),
    num_samples=1,
)
TARGET = Target(
    read=decode_plan,
    raises=(RuntimeError,),
    seeds=[encode_plan(EMPTY_PLAN), encode_plan(StepPlan(sequences=(STEP,), dropped=(1,)))],
)


def test_the_seeds_are_plans() -> None:
    assert decode_plan(TARGET.seeds[0]) == EMPTY_PLAN
    assert decode_plan(TARGET.seeds[1]).sequences == (STEP,)


@given(st.data())
def test_what_is_no_plan_is_refused(data: st.DataObject) -> None:
    TARGET(data.draw(inputs(TARGET.seeds)))
