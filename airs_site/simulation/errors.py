"""What can be wrong with what a simulation is given."""


class SimulationError(Exception):
    """The simulation cannot run; the message says what to change."""


class BadWorkload(SimulationError):
    """A trace or its parameters do not read."""


class UnknownPolicy(SimulationError):
    """There is no policy of that name."""
