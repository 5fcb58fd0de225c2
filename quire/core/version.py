"""Which Quire this is, also where it runs from a checkout that was never installed."""

__version__ = "0.1.0"
