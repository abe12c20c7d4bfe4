"""The budget holds: peak memory of a real process that runs a container larger than its budget, and of its parts."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from container.errors import MoedockError
from container.reader import ContainerReader
from runtime.compute import products
from runtime.engine import Engine
from runtime.memory.plan import MemoryPlan, plan_memory
from runtime.options import RunOptions
from tests.containers import build_container, kimi_linear_config

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

# a prompt in two chunks, which between them want most experts, then some tokens one by one
RUN = """
import json, sys
from pathlib import Path
from container.machine import peak_memory
from runtime.engine import Engine
from runtime.options import RunOptions

folder, budget, chunk = sys.argv[1:]
options = RunOptions(threads=2, budget_bytes=int(budget), chunk=int(chunk), context=1024)
with Engine.open(Path(folder), options) as engine:
    state = engine.new_state()
    engine.feed(state, [(7 * n * n) % engine.vocab_size for n in range(300)])
    for token in range(5):
        engine.step(state, token)
    read_bytes = engine.store.statistics.read_bytes
    print(json.dumps({"peak": peak_memory(), "read": read_bytes, "slots": engine.store.n_slots}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 0.4 GB on disk beside a trunk of a few megabytes."""
    config = kimi_linear_config(
        num_hidden_layers=4,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=1024,
        num_experts=128,
        num_experts_per_token=8,
    )
    return build_container(tmp_path_factory.mktemp("large"), config, checksums=False, random_integers=True)


def planned(folder: Path, options: RunOptions) -> MemoryPlan:
    with ContainerReader.open(folder) as reader:
        return plan_memory(reader.manifest, reader.model, options, n_threads=2)


def test_a_process_stays_within_a_budget_that_its_container_exceeds(large: Path) -> None:
    plan = planned(large, RunOptions(context=1024, chunk=200))
    budget_bytes = plan.floor_bytes + 30 * plan.slot_bytes
    banks_bytes = sum(path.stat().st_size for path in large.glob("experts-*"))
    assert banks_bytes > 400 * MIB > budget_bytes
    command = [sys.executable, "-c", RUN, str(large), str(budget_bytes), "200"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=200)
    result = json.loads(run.stdout)
    assert result["slots"] == plan.minimum_slots + 30
    assert result["read"] > 400 * MIB  # more passed through memory than was allowed in it
    assert budget_bytes // 2 < result["peak"] <= budget_bytes


def test_a_budget_below_the_floor_is_refused_before_anything_is_read(large: Path, monkeypatch) -> None:
    monkeypatch.setattr("runtime.engine.Trunk", lambda *_, **__: pytest.fail("the trunk was opened"))
    options = RunOptions(threads=2, context=1024, chunk=200)
    floor_bytes = planned(large, options).floor_bytes
    with pytest.raises(MoedockError, match="this container needs at least"):
        Engine.open(large, RunOptions(threads=2, context=1024, chunk=200, budget_bytes=floor_bytes - 1))


@pytest.mark.parametrize(("family", "chunk"), [("k3", 300), ("kimi_linear", 300), ("kimi_linear", 1)])
def test_scratch_is_no_more_than_planned(family: str, chunk: int, request: pytest.FixtureRequest, monkeypatch) -> None:
    """What numpy allocates while a prompt and a token are taken, state and cache being there before."""
    with Engine.open(request.getfixturevalue(family), RunOptions(threads=2, chunk=chunk, context=512)) as engine:
        engine.feed(engine.new_state(), [1, 2, 3])  # compiles what is not yet
        monkeypatch.setattr(products.buffers, "_kept", {})
        state = engine.new_state()
        ids = [(7 * n * n) % engine.vocab_size for n in range(300 if chunk > 1 else 3)]
        tracemalloc.start()
        try:
            engine.feed(state, ids)
            engine.step(state, 5)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        scratch_bytes = engine.plan.scratch_bytes
    assert scratch_bytes / 4 < peak <= scratch_bytes + MIB // 2  # the rest is Python's own objects
