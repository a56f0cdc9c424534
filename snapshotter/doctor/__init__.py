"""What `bootseer doctor` checks. Each module looks at one part of the world; its checks take facts and are pure.

A check never changes anything and never raises: what cannot be looked at is a check that failed, with the reason.
"""

from snapshotter.doctor.examine import Subject, examine
from snapshotter.doctor.model import Check, State

__all__ = ["Check", "State", "Subject", "examine"]
