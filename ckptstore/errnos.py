"""What errnos mean for a backend that stands on a file system or a socket."""

from __future__ import annotations

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EINTR,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
    }
)
"""What may go away by itself."""
