"""For all tests: hypothesis draws the same examples at every run, so that a failure is found again.

`HYPOTHESIS_PROFILE=random make test` draws anew; the soak tests do so by themselves.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
