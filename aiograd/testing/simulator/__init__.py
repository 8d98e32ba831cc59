"""The simulator: the library's own code in virtual time, on a wire with seeded faults."""
