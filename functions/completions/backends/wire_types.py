"""Types that several containers' records have in common."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

TokenCount: TypeAlias = Annotated[int, Field(ge=0, le=2**31)]
"""What a container may claim to have used: the bill is made of it."""
