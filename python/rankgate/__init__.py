"""rankgate: engine ranks behind one gateway. The Python package has the tensor-parallel relay, `rankgate.relay`."""

__version__ = "0.1.0"
