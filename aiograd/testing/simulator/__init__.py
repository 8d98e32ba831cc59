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
    planted_bugs   bugs that the simulator has to find; imports only the library
    run            one seed, and the same with fewer faults
    simulate       a program of the user's own
    large          a cluster of hundreds of workers, with the cluster layer's own messages
    crashpoints/   small programs with a fault at every boundary
    succession/    a cluster that loses its coordinator again and again

`python -m aiograd.testing.simulator` replays seeds and looks for planted bugs.

A module imports only modules above it. Of `workload/`, `calls` stands above `invariants`, which
checks with one of its functions that workers answer, and the other modules stand below.
"""

from aiograd.testing.simulator.schedule import Fault
from aiograd.testing.simulator.simulate import SimulationFailed, simulate

__all__ = ["Fault", "SimulationFailed", "simulate"]
