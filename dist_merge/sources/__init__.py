"""Kinds of sharded checkpoints; one file each, one line in the table."""

from __future__ import annotations

from collections.abc import Mapping

from ..contracts import Source
from .dcp import DcpSource
from .hf_storage import HfStorageSource
from .rank_files import RankFileSource

SOURCES: Mapping[str, Source] = {
    source.backend: source for source in (RankFileSource(), DcpSource(), HfStorageSource())
}
