"""Removing what nobody needs any more, safely beside everybody who saves and loads (DESIGN part 8)."""
