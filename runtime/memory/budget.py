"""How much memory a run may take: a safe share of the machine's, or what the user says; never less than the floor."""

from __future__ import annotations

from dataclasses import dataclass

from container.errors import MoedockError
from container.machine import MemoryFigures
from container.progress import size
from runtime.memory.plan import MemoryPlan

# Of the memory that this process could ever have: what the system, its caches and other programs need is the rest.
MOST_SHARE = 7 / 8
# Of the same memory: what must stay available to others while we run, whatever is available now.
SPARE_SHARE = 1 / 16

_PARTS = {
    "process": "interpreter, libraries, threads",
    "trunk": "trunk as stored",
    "derived": "small tensors in another form",
    "codebooks": "codebooks",
    "kda_state": "delta-attention state",
    "latent_cache": "latent cache of {plan.context} positions",
    "scratch": "scratch of a chunk of {plan.chunk} tokens",
    "minimum_cache": "smallest expert cache, {plan.minimum_slots} experts",
}


@dataclass(frozen=True)
class Budget:
    """Bytes of memory of the whole process, and what a person should know about them."""

    n_bytes: int
    warning: str | None = None


def choose_budget(plan: MemoryPlan, machine: MemoryFigures, wanted_bytes: int | None = None) -> Budget:
    """The budget that the user wants, or else the default. Raises MoedockError with all figures where none is possible.

    The default is at most 7/8 of the memory that this process could have. Where that is more than other programs and
    the swap in use leave, it goes down in steps of one token's working set; and it is never more than what caches all.
    """
    if wanted_bytes is not None:
        return _wanted(plan, machine, wanted_bytes)
    usable = machine.usable_bytes
    if usable is None:
        raise MoedockError(
            "this system does not say how much memory it has; give --budget, at least "
            f"{size(plan.floor_bytes)} for this container\n{floor_text(plan)}"
        )
    most = int(usable * MOST_SHARE)
    safe = min(most, _left_over(machine, usable))
    if safe < plan.floor_bytes:
        raise MoedockError(_refusal(plan, machine, f"a safe share of this machine's memory is {size(max(safe, 0))}"))
    steps = -(-(most - safe) // plan.working_set_bytes) if plan.working_set_bytes else 0
    stepped = most - steps * plan.working_set_bytes
    return Budget(min(stepped if stepped >= plan.floor_bytes else safe, plan.most_bytes))


def floor_text(plan: MemoryPlan) -> str:
    """The parts of the floor, a line each."""
    lines = [f"  {size(n_bytes):>10}  {_PARTS[name].format(plan=plan)}" for name, n_bytes in plan.parts.items()]
    return "\n".join([*lines, f"  {size(plan.floor_bytes):>10}  in all"])


def _wanted(plan: MemoryPlan, machine: MemoryFigures, wanted_bytes: int) -> Budget:
    if wanted_bytes < plan.floor_bytes:
        raise MoedockError(_refusal(plan, machine, f"the budget is {size(wanted_bytes)}"))
    usable, available = machine.usable_bytes, machine.available_bytes
    if usable is not None and wanted_bytes > usable:
        raise MoedockError(
            f"a budget of {size(wanted_bytes)} is more than the {size(usable)} of memory that this process can have; "
            f"at least {size(plan.floor_bytes)} are needed, more than {size(plan.most_bytes)} changes nothing"
        )
    if available is not None and min(wanted_bytes, plan.most_bytes) > available:
        return Budget(
            wanted_bytes,
            f"the budget is {size(wanted_bytes)}, but only {size(available)} are available now: close other programs "
            "or expect the system to swap",
        )
    return Budget(wanted_bytes)


def _left_over(machine: MemoryFigures, usable: int) -> int:
    """What others leave: available memory without a reserve, and without what is swapped out and may come back."""
    if machine.available_bytes is None:
        return usable
    return machine.available_bytes - int(usable * SPARE_SHARE) - machine.swap_used_bytes


def _refusal(plan: MemoryPlan, machine: MemoryFigures, given: str) -> str:
    figures = {
        "memory": machine.physical_bytes,
        "control group limit": machine.limit_bytes,
        "available": machine.available_bytes,
        "swap in use": machine.swap_used_bytes or None,
    }
    known = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in figures.items() if n_bytes is not None)
    need = f"this container needs at least {size(plan.floor_bytes)} of memory, {given}"
    return f"{need} (this machine: {known or 'unknown'})\n{floor_text(plan)}\n{_advice(plan)}"


def _advice(plan: MemoryPlan) -> str:
    ways = ["close other programs", "use a machine with more memory"]
    if plan.chunk > 1:
        ways.insert(0, f"take a smaller --chunk (scratch is {size(plan.scratch_bytes)})")
    if plan.latent_bytes:
        ways.insert(0, f"take a smaller --ctx ({size(plan.latent_bytes_per_position)} a position)")
    return f"what may help: {'; '.join(ways)}"
