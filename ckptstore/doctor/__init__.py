"""Doctor: does a store work here, for this user, through the code that saves and loads use?

Every finding says what was looked at, what was found and what that means. Nothing of a checkpoint is
touched. What is written to try the place out has keys under ``doctor/``, where no part of the store ever
looks, and is deleted again, whatever happens in between.
"""

from ckptstore.doctor.findings import Finding, Status
from ckptstore.doctor.installation import examine_installation
from ckptstore.doctor.place import MIN_FREE_BYTES, MIN_FREE_INODES
from ckptstore.doctor.trial import MAX_CLOCK_SECONDS, PREFIX, RACERS, ROUND_TRIP_BYTES
from ckptstore.doctor.visit import examine, examine_place

__all__ = [
    "MAX_CLOCK_SECONDS",
    "MIN_FREE_BYTES",
    "MIN_FREE_INODES",
    "PREFIX",
    "RACERS",
    "ROUND_TRIP_BYTES",
    "Finding",
    "Status",
    "examine",
    "examine_installation",
    "examine_place",
]
