"""Named fault points: places between two steps where a test may break the process.

Lives here: the names, and `reach`, which does nothing unless a test armed a fault. May not live
here: anything that imports onceflow. Start reading in `points.py`.
"""

from onceflow.faults.points import (
    EPOCH,
    FOLDER,
    JOB,
    KAFKA,
    KEYED,
    OPENING,
    POINTS,
    POSTGRES,
    PUT,
    ROLL_UP,
    SERVICES,
    SNAPSHOTS,
    SOME_OPENINGS,
    SQLITE,
    TASK,
    TRIM,
    WITHIN,
    InjectedFault,
    arm,
    arm_from_environment,
    disarm,
    reach,
    reach_in_task,
    record,
)

__all__ = [
    "EPOCH",
    "FOLDER",
    "JOB",
    "KAFKA",
    "KEYED",
    "OPENING",
    "POINTS",
    "POSTGRES",
    "PUT",
    "ROLL_UP",
    "SERVICES",
    "SNAPSHOTS",
    "SOME_OPENINGS",
    "SQLITE",
    "TASK",
    "TRIM",
    "WITHIN",
    "InjectedFault",
    "arm",
    "arm_from_environment",
    "disarm",
    "reach",
    "reach_in_task",
    "record",
]
