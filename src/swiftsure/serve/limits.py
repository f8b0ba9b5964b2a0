"""`Limits`: what a server accepts."""

from dataclasses import dataclass

from swiftsure._lib import checks

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """What a server accepts.

    Attributes
    ----------
    max_batch : int
        Largest number of samples in a batch.
    max_wait_ms : float
        How long the first sample of a batch waits for others.
    max_queue : int
        How many samples may wait; more are refused with `BusyError`.
    max_audits : int
        How many audits may wait; more are dropped.
    timeout : float
        Seconds that a body may take to arrive (else 408), and an answer to be ready (else 504).
    max_body : int
        Largest body, in bytes.
    """

    max_batch: int = 16
    max_wait_ms: float = 0.0
    max_queue: int = 256
    max_audits: int = 256
    timeout: float = 30.0
    max_body: int = 8 << 20

    def __post_init__(self) -> None:
        """Refuse impossible limits before the server starts."""
        for name in ("max_batch", "max_queue", "max_audits", "max_body"):
            checks.count(name, getattr(self, name))
        checks.between("timeout", self.timeout, 0.0, float("inf"))
        if not 0 <= self.max_wait_ms <= 60_000:
            raise ValueError(f"`max_wait_ms` must be in [0, 60000], but got {self.max_wait_ms:g}.")
