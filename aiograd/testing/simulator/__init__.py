"""The simulator: the library's own code in virtual time, on a wire with seeded faults.

    loop           an event loop whose clock jumps; every callback belongs to a node
    threads        threads that take turns with the loop
    network        byte streams that can be cut at any byte
    world          nodes that start, crash, pause and restart; the trace of a run
    schedule       faults, how they happen, and which errors they justify
    plan           what a seed means: workers, options, wire, programs, faults
    ledger         what programs did, judged call by call
    invariants     what must hold after a run, and what workers may answer about a pass
    workload/      programs for random seeds
    run            one seed, and the same with fewer faults
    simulate       a program of the user's own
    crashpoints/   small programs with a fault at every boundary
    planted_bugs   bugs that the simulator has to find
    __main__       the command line: replay seeds, look for planted bugs

Imports go upwards in this list, with two exceptions: `workload` imports `ledger` and `invariants`,
which imports `workload.calls` for the call that shows that a worker is alive; and `planted_bugs`
imports only the library, whose methods it replaces.
"""

from aiograd.testing.simulator.schedule import Fault
from aiograd.testing.simulator.simulate import SimulationFailed, simulate

__all__ = ["Fault", "SimulationFailed", "simulate"]
