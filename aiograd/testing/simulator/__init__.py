"""The simulator: the library's own code in virtual time, on a wire with seeded faults.

loop, threads         time that jumps; callbacks and threads that belong to nodes
network, transport    byte streams that can be cut anywhere
world                 nodes that crash and come back
plan, schedule        what a seed means; faults, and which errors they justify
actors, functions, references, gradients      programs whose outcome is known
ledger, invariants, agreement                 what must hold
programs, trial, crashpoints                  small programs with a fault at every boundary
run, shrink, bugs     one seed; less of it; whether the simulator finds what it should
simulate              programs of your own
"""

from aiograd.testing.simulator.schedule import Fault
from aiograd.testing.simulator.simulate import SimulationFailed, simulate

__all__ = ["Fault", "SimulationFailed", "simulate"]
