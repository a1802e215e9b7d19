"""What can go wrong with a teacher; each message names the teacher and the file."""

from __future__ import annotations


class TeacherError(RuntimeError):
    """Base of the errors below."""


class MissingTeacherError(TeacherError):
    """No such teacher, shard or file."""


class CorruptTeacherError(TeacherError):
    """What is on disk is not what was written."""


class ImportFailedError(TeacherError):
    """A teacher could not be written (a full disk, for one); the store is as it was before."""


class StalledReadError(TeacherError):
    """A read made no progress for too long."""


class TierFullError(TeacherError, ValueError):
    """A teacher does not fit: it is larger than the tier, or all that could make room is leased."""
