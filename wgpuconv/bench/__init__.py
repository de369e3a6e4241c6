"""The benchmark: every side of a problem, ours and other libraries', timed in one run.

``session.Session`` runs it, ``result.load`` reads what it wrote. Nothing is imported here, since a
peer's process needs little of this.
"""
