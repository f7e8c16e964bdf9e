"""How the engine names adapters in its plans: each sequence's with its first step, and none that
has been unloaded.
"""

from dataclasses import replace

from tandem.tests.workers.engine.drive import MakeWorker, run, spec
from tandem.workers.engine.plan import StepPlan


def named(plans: list[StepPlan]) -> list[tuple[int, int]]:
    return [
        (step.sequence_id, step.adapter)
        for plan in plans
        for step in plan.sequences
        if step.adapter
    ]


def test_the_first_step_of_each_sequence_and_choice_names_its_adapter(worker: MakeWorker) -> None:
    target = worker(chunk_tokens=4)
    target.submit(replace(spec(1), adapter=3))
    target.submit(replace(spec(2, num_choices=2), adapter=4))
    target.submit(spec(4))
    run(target)
    assert sorted(set(named(target.executor.plans))) == [(1, 3), (2, 4), (3, 4)]
    assert all(
        step.sampling is not None
        for plan in target.executor.plans
        for step in plan.sequences
        if step.adapter
    )


def test_an_adapter_leaves_after_the_last_step_that_names_it(worker: MakeWorker) -> None:
    target = worker()
    target.submit(replace(spec(1), adapter=3))
    target.submit(replace(spec(2), adapter=5))
    target.step()
    target.engine.unload_adapter(3)
    target.submit(replace(spec(4), adapter=3))  # as one that was accepted just before
    run(target)
    target.submit(spec(6))
    run(target)
    plans = target.executor.plans
    assert [plan.unloaded for plan in plans if plan.unloaded] == [(3,)]
    left = next(index for index, plan in enumerate(plans) if plan.unloaded)
    assert (4, 3) in named(plans[:left])
    assert not named(plans[left:])
