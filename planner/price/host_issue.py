"""What the host's thread takes to start what others do meanwhile."""

from pshard.planner.price.profile_tables import Tables


def copy_issue(tables: Tables) -> float:
    """Seconds to start a copy: events, queue and call; where it was not timed, what issuing a unit takes."""
    return tables.elementwise("acc", "copy", 1, 1) or tables.elementwise("acc", "step", 1, 1)


def follow_issue(tables: Tables) -> float:
    """Seconds that slots which follow use take of a step beside what comes to them; 0 where it was not timed."""
    return tables.elementwise("acc", "slots", 1, 1)


def admit_issue(tables: Tables, copies: int) -> float:
    """Seconds for an expert that comes to a slot in so many copies; where it was not timed, to start these."""
    return tables.elementwise("acc", "admit", 1, 1) or copies * copy_issue(tables)
