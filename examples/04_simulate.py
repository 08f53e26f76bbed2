"""A plan of one's own, priced on a machine that isn't here. Run: python examples/04_simulate.py"""

from __future__ import annotations

from dovetail import sim
from dovetail.plan import Plan, Role, passes
from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.check import check


def neighbours(world: int, size_bytes: int, engines: int) -> Plan:
    """Every rank sends its input to the next one, cut over several engines."""
    a = Assembly(f"shift over {engines} engines", world)
    inp = a.buffer("input", Role.INPUT, size_bytes)
    out = a.buffer("output", Role.OUTPUT, size_bytes)
    part = size_bytes // engines
    for r in range(world):
        right = (r + 1) % world
        for e in range(engines):
            done = a.signal(f"done {r}.{e}", right)
            copy = st.copy((r, inp, e * part), (right, out, e * part), part)
            a.goal(copy)
            a.queue(r, e, copy, st.signal(done), name=f"part {e}")
            a.queue(right, engines + e, st.wait(done), name=f"from {r}, part {e}")
    return a.plan()


def main() -> None:
    machine = sim.load("mi300x")
    print(f"simulated on {machine.title}")
    for engines in (1, 2, 4):
        plan = neighbours(8, 1 << 20, engines)
        check(passes.entry(plan))  # the plan that is priced is one that could run
        for made in (plan, passes.prelaunch(plan)):
            found = sim.price(made, machine)
            phases = ", ".join(f"{phase} {share:.0%}" for phase, share in found.shares().items())
            how = "prelaunched" if "prelaunch" in made.passes else "submitted"
            print(f"{plan.name}, {how}: {found.time_us:.1f} us ({phases})")


if __name__ == "__main__":
    main()
